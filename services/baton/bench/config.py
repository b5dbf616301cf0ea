"""What is measured, and how: the options of the commands, checked."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from baton.bench.goals import Goals
from baton.options import ConfigError, check_choice, check_range

WORKLOADS = ("random", "shared-prefix", "sharegpt", "mooncake", "burstgpt")
TRACES = ("mooncake", "burstgpt")
"""Those that say when to send."""

_MOST_REQUESTS = 1_000_000
_MOST_TOKENS = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadConfig:
    """The options of a workload. Raises ConfigError for a value that cannot work."""

    workload: str = "random"
    dataset: Path | None = None
    num_prompts: int = 100
    input_len: int = 128
    output_len: int = 32
    range_ratio: float = 0.0
    """Lengths are uniform in ``len · (1 ± range_ratio)``."""
    prefix_len: int = 256
    num_prefixes: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("workload", self.workload, WORKLOADS)
        check_range("num_prompts", self.num_prompts, 1, _MOST_REQUESTS)
        for option in ("input_len", "output_len", "prefix_len"):
            check_range(option, getattr(self, option), 1, _MOST_TOKENS)
        check_range("num_prefixes", self.num_prefixes, 1, _MOST_REQUESTS)
        _check_between("range_ratio", self.range_ratio, 0, 1)
        if self.workload in TRACES and self.dataset is None:
            raise ConfigError("dataset", f"--workload {self.workload} needs the path of a trace")
        if self.dataset is not None and self.workload not in (*TRACES, "sharegpt"):
            allowed = ", ".join(("sharegpt", *TRACES))
            raise ConfigError("dataset", f"can only be given with --workload {allowed}")
        if self.dataset is not None and not self.dataset.is_file():
            raise ConfigError("dataset", f"{self.dataset} is no file")


PROMPT_FORMS = ("auto", "ids", "text")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """What to measure and how to offer it. Raises ConfigError for a value that cannot work."""

    workload: WorkloadConfig
    url: str = "http://127.0.0.1:8000"
    model: str | None = None
    tokenizer: str | None = None
    """Whose vocabulary prompts are made of; None: the model's, by its name."""
    api_key: str | None = None
    request_rate: float | None = None
    """Requests/s; None: a trace's own times, otherwise all at once."""
    burstiness: float = 1.0
    max_concurrency: int | None = None
    """A closed loop with so many open requests, instead of times."""
    speedup: float = 1.0
    """A trace's times are divided by it."""
    goals: Goals = field(default_factory=Goals)
    prompts: str = "auto"
    ignore_eos: bool = True
    temperature: float = 0.0
    timeout: float = 600.0
    """Seconds until a request is given up."""

    def __post_init__(self) -> None:
        parse_url("url", self.url)
        check_choice("prompts", self.prompts, PROMPT_FORMS)
        _check_between("temperature", self.temperature, 0, 2)
        _check_positive("timeout", self.timeout)
        _check_positive("burstiness", self.burstiness)
        _check_positive("speedup", self.speedup)
        if self.request_rate is not None and not self.request_rate > 0:
            raise ConfigError("request_rate", f"must be above 0, or inf, not {self.request_rate:g}")
        if self.max_concurrency is not None:
            check_range("max_concurrency", self.max_concurrency, 1, 100_000)
            if self.request_rate is not None:
                raise ConfigError("max_concurrency", "cannot be given together with --request-rate")
        if self.speedup != 1 and not self.keeps_times:
            raise ConfigError("speedup", "can only be given where a trace says when to send")
        if self.burstiness != 1 and self.request_rate in (None, math.inf):
            raise ConfigError("burstiness", "can only be given with a finite --request-rate")

    @property
    def keeps_times(self) -> bool:
        """Whether requests are sent when a trace says."""
        timed = self.workload.workload in TRACES
        return timed and self.request_rate is None and self.max_concurrency is None


def _check_between(option: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # also where it is no number
        raise ConfigError(option, f"must be from {low:g} to {high:g}, not {value:g}")


def _check_positive(option: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ConfigError(option, f"must be above 0, not {value:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyConfig:
    """One batch, and how often. Raises ConfigError for a value that cannot work."""

    batch_size: int = 8
    input_len: int = 32
    output_len: int = 128
    warmups: int = 3
    repeats: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        for option in ("batch_size", "input_len", "output_len", "repeats"):
            check_range(option, getattr(self, option), 1, 1_000_000)
        check_range("warmups", self.warmups, 0, 1_000_000)


def parse_url(option: str, url: str) -> SplitResult:
    """The server's address, without ``/v1``. Raises ConfigError that names ``option``."""
    base = urlsplit(url.rstrip("/").removesuffix("/v1"))
    try:
        usable = base.scheme in ("http", "https") and base.hostname and (base.port or 1)
    except ValueError:  # a port out of range
        usable = False
    if not usable:
        raise ConfigError(option, f"{url!r} is not an address; write it like http://127.0.0.1:8000")
    return base
