"""The number of workers of each role: one search over both."""

from __future__ import annotations

from dataclasses import dataclass

from baton.planner.goals import LatencyTargets, PlanBounds
from baton.planner.measured import Counts
from baton.planner.queueing import DecodeLoad, PrefillLoad

SAME = 1e-3
"""The difference below which shares of late requests are equal: then fewer GPUs are better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The load of both roles."""

    prefill: PrefillLoad
    decode: DecodeLoad
    before_s: float
    """The part of the TTFT target that is spent outside of prefill and its queue, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A choice of workers, and what is expected of it."""

    workers: Counts
    late_prefill: float
    """The share of requests that prefill makes late, 0 to 1."""
    late_decode: float
    pressure: float
    """The pressure on the role with less to spare: from 1 on that role cannot keep up."""
    other_pressure: float
    """The pressure on the other role."""

    @property
    def late(self) -> float:
        return 1 - (1 - self.late_prefill) * (1 - self.late_decode)


class ServiceEstimate:
    """Estimates of late requests by number of workers; each role's figures are computed once."""

    def __init__(self, demand: Demand, targets: LatencyTargets) -> None:
        self._demand = demand
        self._ttft_s = max(0.0, targets.ttft_s - demand.before_s)
        self._itl_s = targets.itl_s
        self._prefill: dict[int, tuple[float, float]] = {}
        self._decode: dict[int, tuple[float, float]] = {}

    def size(self, workers: Counts) -> Size:
        """Estimate for ``workers``, at least one of each role."""
        p, d = workers.prefill, workers.decode
        if p not in self._prefill:
            load = self._demand.prefill
            self._prefill[p] = load.late(p, self._ttft_s), load.pressure(p)
        if d not in self._decode:
            answers = self._demand.decode
            self._decode[d] = answers.late(d, self._itl_s), answers.pressure(d, self._itl_s)
        (late_prefill, prompts), (late_decode, sequences) = self._prefill[p], self._decode[d]
        return Size(
            workers=workers,
            late_prefill=late_prefill,
            late_decode=late_decode,
            pressure=max(prompts, sequences),
            other_pressure=min(prompts, sequences),
        )


def smallest(estimate: ServiceEstimate, targets: LatencyTargets, bounds: PlanBounds) -> Size:
    """Find the fewest GPUs with which enough requests meet both targets; among equals the choice with the
    fewest late requests. Late requests are not split between the roles beforehand: the choice is of both at
    once. If nothing within the bounds is enough, return the choice with the fewest late requests, or the
    least overloaded one."""
    allowed = 1 - targets.attainment
    found: Size | None = None
    for prefill in range(bounds.min_prefill, bounds.max_prefill + 1):
        for decode in range(bounds.min_decode, bounds.max_decode + 1):
            workers = Counts(prefill=prefill, decode=decode)
            if not bounds.allow(workers):
                break
            size = estimate.size(workers)
            if found is None or _better(size, found, allowed, bounds):
                found = size
            if size.late_decode < SAME * allowed:
                break  # more decode workers would help no request
        if found is not None and found.late_prefill < SAME * allowed and found.late <= allowed:
            break
    assert found is not None  # PlanBounds ensures it
    return found


def _better(one: Size, other: Size, allowed: float, bounds: PlanBounds) -> bool:
    enough = one.late <= allowed
    if enough != (other.late <= allowed):
        return enough
    if not enough and abs(one.late - other.late) > SAME:
        return one.late < other.late
    if not enough:
        return (one.pressure, one.other_pressure) < (other.pressure, other.other_pressure)
    cost, others = bounds.gpus(one.workers), bounds.gpus(other.workers)
    return (cost, one.late) < (others, other.late)
