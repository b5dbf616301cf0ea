"""The properties of a simulated worker: how long its steps take, what its KV weighs, how it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType

import msgspec

from baton.process.options import ConfigError

MAX_FILE_BYTES = 1 << 20
_MAY_BE_ZERO = frozenset(
    {"step_base_ms", "step_row_ms", "prefill_ms_per_1k", "context_ms_per_1k", "load_s", "mean_output_tokens"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A step that decodes n sequences over c tokens of context, and computes p prompt tokens, takes
    ``step_base_ms + n * step_row_ms + c / 1000 * context_ms_per_1k + p / 1000 * prefill_ms_per_1k``.

    Raises ConfigError for a figure out of range.
    """

    step_base_ms: float = 8.0
    step_row_ms: float = 0.02
    context_ms_per_1k: float = 0.04
    prefill_ms_per_1k: float = 40.0
    kv_bytes_per_token: int = 131_072
    """The bytes that a token's KV would have. In the pool it takes 8 bytes."""
    link_bytes_per_s: float = 10e9
    """The bandwidth at which one worker sends KV."""
    mean_output_tokens: float = 0.0
    """The mean length of answers: each token is the last one with probability 1 / this. 0: answers end by
    their own limits alone."""
    load_s: float = 0.0
    """The time from the worker's start until it is ready, in seconds."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = "0 or more" if field.name in _MAY_BE_ZERO else "more than 0"
            if value < 0 or (value == 0 and field.name not in _MAY_BE_ZERO):
                raise ConfigError("profile", f"{field.name} must be {least}, not {value:g}")

    def step_s(self, rows: int, context: int, prompt_tokens: int) -> float:
        """Return the seconds of a step that decodes ``rows`` sequences over ``context`` tokens of all of
        them."""
        beyond = context * self.context_ms_per_1k + prompt_tokens * self.prefill_ms_per_1k
        return (self.step_base_ms + rows * self.step_row_ms + beyond / 1e3) / 1e3


PROFILES: Mapping[str, Profile] = MappingProxyType(
    {
        # Computed from bytes over bandwidth and operations over rate, halved for losses: 16 GB of weights and
        # 128 KiB a token over 3.35 TB/s, 16 GFLOP a token over 990 TFLOP/s. Not measured.
        "8b-h100": Profile(),
        "8b-l4": Profile(
            step_base_ms=110.0,
            step_row_ms=0.1,
            context_ms_per_1k=0.9,
            prefill_ms_per_1k=270.0,
            link_bytes_per_s=2e9,
        ),
        # Steps that take no time, to measure what surrounds them.
        "instant": Profile(step_base_ms=0.0, step_row_ms=0.0, context_ms_per_1k=0.0, prefill_ms_per_1k=0.0),
    }
)


def profile_of(name: str) -> Profile:
    """Return a profile by its name, or from a JSON file of some of its fields. Raises ConfigError."""
    known = PROFILES.get(name)
    if known is not None:
        return known
    file = Path(name).expanduser()
    try:
        size = file.stat().st_size
        if size > MAX_FILE_BYTES:
            raise ConfigError("profile", f"{name} has {size} bytes; at most {MAX_FILE_BYTES} are allowed")
        return msgspec.json.decode(file.read_bytes(), type=Profile)
    except OSError as error:
        names = ", ".join(PROFILES)
        reason = error.strerror or error
        raise ConfigError("profile", f"{name!r} is none of {names}, and no file: {reason}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError("profile", f"{name}: {error}") from error
