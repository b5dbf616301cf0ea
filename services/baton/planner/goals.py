"""The planner's targets and bounds."""

from __future__ import annotations

from dataclasses import dataclass, fields

from baton.planner.measured import Counts
from baton.process.options import ConfigError, check_range

MAX_WORKERS = 1024
"""Most workers of one role. A plan is a search over the workers of both roles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyTargets:
    """Latencies, and the share of requests that is to meet both. Raises ConfigError for values out of
    range."""

    ttft_s: float
    itl_s: float
    attainment: float = 0.99

    def __post_init__(self) -> None:
        for name in ("ttft_s", "itl_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(name, f"must be more than 0, not {getattr(self, name):g}")
        check_range("attainment", self.attainment, 0.5, 0.9999)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanBounds:
    """Bounds of the workers that may be asked for. Raises ConfigError when they allow none."""

    gpu_budget: int
    """GPUs of all workers together."""
    prefill_gpus: int = 1
    """GPUs of one prefill worker."""
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
            if most > MAX_WORKERS:
                raise ConfigError(f"max_{role}", f"must be at most {MAX_WORKERS}, not {most}")
        if self.min_gpus > self.gpu_budget:
            raise ConfigError(
                "gpu_budget",
                f"{self.gpu_budget} is less than the {self.min_gpus} GPUs of the fewest workers",
            )

    @property
    def min_gpus(self) -> int:
        """The GPUs of the fewest workers allowed."""
        return self.gpus(Counts(prefill=self.min_prefill, decode=self.min_decode))

    def gpus(self, workers: Counts) -> int:
        return workers.prefill * self.prefill_gpus + workers.decode * self.decode_gpus

    def allow(self, workers: Counts) -> bool:
        """Whether the bounds allow these workers."""
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
    """How long actions take and how long figures count, in seconds. Raises ConfigError for values out of
    range."""

    start_s: float
    """The time from asking for a pod until it serves."""
    switch_s: float = 15.0
    """The time from asking a worker to change its role until it serves in the new one."""
    settle_s: float = 300.0
    """The time for which fewer workers must have been enough before their number shrinks."""
    stale_s: float = 60.0
    """The age from which figures are not acted on."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise ConfigError(field.name, f"must be more than 0, not {getattr(self, field.name):g}")
