"""What the planner is to reach, and within which bounds."""

from __future__ import annotations

from dataclasses import dataclass, fields

from baton.options import ConfigError, check_range
from baton.planner.measured import Counts

MOST_WORKERS = 1024
"""Of one role. A plan is a search over both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Latencies, and the share of requests that is to meet both. Raises ConfigError."""

    ttft_s: float
    itl_s: float
    attainment: float = 0.99

    def __post_init__(self) -> None:
        for name in ("ttft_s", "itl_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(name, f"must be more than 0, not {getattr(self, name):g}")
        check_range("attainment", self.attainment, 0.5, 0.9999)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What may be asked for. Raises ConfigError when nothing may."""

    gpu_budget: int
    """GPUs of all workers together."""
    prefill_gpus: int = 1
    """Of one worker."""
    decode_gpus: int = 1
    min_prefill: int = 1
    max_prefill: int = 64
    min_decode: int = 1
    max_decode: int = 64

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise ConfigError(field.name, f"must be at least 1, not {getattr(self, field.name)}")
        for role in ("prefill", "decode"):
            least, most = getattr(self, f"min_{role}"), getattr(self, f"max_{role}")
            if least > most:
                raise ConfigError(f"min_{role}", f"{least} is more than max_{role}, {most}")
            if most > MOST_WORKERS:
                raise ConfigError(f"max_{role}", f"must be at most {MOST_WORKERS}, not {most}")
        if self.least_gpus > self.gpu_budget:
            raise ConfigError(
                "gpu_budget",
                f"{self.gpu_budget} is less than the {self.least_gpus} GPUs of the fewest workers",
            )

    @property
    def least_gpus(self) -> int:
        """Of the fewest workers."""
        return self.gpus(Counts(prefill=self.min_prefill, decode=self.min_decode))

    def gpus(self, workers: Counts) -> int:
        return workers.prefill * self.prefill_gpus + workers.decode * self.decode_gpus

    def allow(self, workers: Counts) -> bool:
        """Whether there may be so many."""
        return (
            self.min_prefill <= workers.prefill <= self.max_prefill
            and self.min_decode <= workers.decode <= self.max_decode
            and self.gpus(workers) <= self.gpu_budget
        )

    @property
    def interchangeable(self) -> bool:
        """Whether a worker may change its role: the pods of both have the same GPUs."""
        return self.prefill_gpus == self.decode_gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds that actions take, and for how long figures count. Raises ConfigError."""

    start_s: float
    """From asking for a pod until it serves."""
    switch_s: float = 15.0
    """From asking a worker to change its role until it serves in it."""
    settle_s: float = 300.0
    """For so long fewer workers must have been enough before there are fewer."""
    stale_s: float = 60.0
    """Figures that are older are not acted on."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise ConfigError(field.name, f"must be more than 0, not {getattr(self, field.name):g}")
