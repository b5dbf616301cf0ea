"""The faults of a simulated worker, at random and as often as asked for."""

from __future__ import annotations

import logging
import os
import random
import time
from dataclasses import dataclass, fields

from baton.process.options import ConfigError

log = logging.getLogger(__name__)

DEATH = 137
"""The exit status of a process that was killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultOptions:
    """Each mean is that of an exponentially distributed time in seconds; 0: never. Raises ConfigError for
    values out of range."""

    die_mean_s: float = 0.0
    """The mean time from the worker's start to its sudden end."""
    hang_mean_s: float = 0.0
    """The mean time between hangs, in which no step ends."""
    hang_s: float = 3.0
    slow_mean_s: float = 0.0
    """The mean time between slow phases, in which steps take ``slow_factor`` as long."""
    slow_s: float = 10.0
    slow_factor: float = 5.0
    error_rate: float = 0.0
    """The share of tokens that are replaced by an error, which ends the request."""
    seed: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and value < 0:
                raise ConfigError("fault", f"{field.name} must be 0 or more, not {value:g}")
        if self.error_rate > 1:
            raise ConfigError("fault", f"error_rate must be between 0 and 1, not {self.error_rate:g}")


def parse_faults(given: list[str]) -> FaultOptions:
    """Parse ``name=figure`` options. Raises ConfigError that names the options allowed."""
    known = {field.name for field in fields(FaultOptions)}
    figures: dict[str, float] = {}
    for one in given:
        name, equals, figure = one.partition("=")
        name = name.replace("-", "_")
        if name not in known or not equals:
            raise ConfigError("fault", f"{one!r}: write name=figure, with one of {', '.join(sorted(known))}")
        try:
            figures[name] = float(figure)
        except ValueError:
            raise ConfigError("fault", f"{one!r}: {figure!r} is not a number") from None
    seed = figures.pop("seed", None)
    return FaultOptions(seed=None if seed is None else int(seed), **figures)


class Faults:
    """Draws the faults, for the thread that runs the steps."""

    def __init__(self, options: FaultOptions | None = None) -> None:
        self._options = options or FaultOptions()
        self._rng = random.Random(self._options.seed)
        now = time.monotonic()
        self._dies_at = self._later(now, self._options.die_mean_s)
        self._hangs_at = self._later(now, self._options.hang_mean_s)
        self._slows_at = self._later(now, self._options.slow_mean_s)

    def _later(self, now: float, mean_s: float) -> float:
        return now + self._rng.expovariate(1 / mean_s) if mean_s else float("inf")

    def error(self) -> str | None:
        """Return the error that replaces the next token, or None."""
        rate = self._options.error_rate
        return "an error was simulated" if rate and self._rng.random() < rate else None

    def stretched(self, seconds: float) -> float:
        """Return how long a step takes that should take ``seconds``. Ends the process when its time has
        come."""
        now, options = time.monotonic(), self._options
        if now >= self._dies_at:
            log.warning("a death is simulated")
            os._exit(DEATH)
        if now >= self._hangs_at:
            self._hangs_at = self._later(now + options.hang_s, options.hang_mean_s)
            log.warning("no step for %g s is simulated", options.hang_s)
            return seconds + options.hang_s
        if now >= self._slows_at + options.slow_s:
            self._slows_at = self._later(now, options.slow_mean_s)
        return seconds * options.slow_factor if now >= self._slows_at else seconds
