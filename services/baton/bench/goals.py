"""The latency goals that a request must meet to count as good."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from baton.process.options import ConfigError


@dataclass(frozen=True, slots=True)
class Goals:
    """Upper limits in seconds; None: no limit."""

    ttft: float | None = None
    tpot: float | None = None
    itl: float | None = None
    """The limit of the 99th percentile of one request's inter-token latencies."""
    e2e: float | None = None

    def __bool__(self) -> bool:
        return any(getattr(self, name) is not None for name in NAMES)

    def __str__(self) -> str:
        limits = ((name, getattr(self, name)) for name in NAMES)
        return " ".join(f"{name}:{limit * 1e3:g}" for name, limit in limits if limit is not None)


NAMES = tuple(field.name for field in fields(Goals))


def parse_goals(option: str, texts: Iterable[str]) -> Goals:
    """Parse goals such as ``ttft:500``, in milliseconds; one text may hold several, separated by spaces or
    commas. Raises ConfigError that names ``option``."""
    limits: dict[str, float] = {}
    for part in " ".join(texts).replace(",", " ").split():
        name, _, value = part.partition(":")
        limit = _milliseconds(value)
        if name not in NAMES or limit is None:
            allowed = ", ".join(f"{allowed}:MS" for allowed in NAMES)
            raise ConfigError(option, f"{part!r} is no goal; allowed: {allowed}, with MS above 0")
        if name in limits:
            raise ConfigError(option, f"{name} is given twice")
        limits[name] = limit / 1e3
    return Goals(**limits)


def _milliseconds(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < float("inf") else None
