"""How many workers of each role: one search over both."""

from __future__ import annotations

from dataclasses import dataclass

from baton.planner.goals import Bounds, Targets
from baton.planner.measured import Counts
from baton.planner.queueing import DecodeLoad, PrefillLoad

SAME = 1e-3
"""Shares of late requests that differ by less are alike: then the fewer GPUs are better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What both roles are to bear."""

    prefill: PrefillLoad
    decode: DecodeLoad
    before_s: float
    """Of the target for the first token, what is spent elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A choice, and what is expected of it."""

    workers: Counts
    late_prefill: float
    """Share of requests, 0 to 1."""
    late_decode: float
    pressure: float
    """On the role that has less to spare: from 1 on it cannot keep up."""
    other_pressure: float
    """On the other one."""

    @property
    def late(self) -> float:
        return 1 - (1 - self.late_prefill) * (1 - self.late_decode)


class Estimate:
    """What would be late with so many workers; each role's figures are worked out once."""

    def __init__(self, demand: Demand, targets: Targets) -> None:
        self._demand = demand
        self._ttft_s = max(0.0, targets.ttft_s - demand.before_s)
        self._itl_s = targets.itl_s
        self._prefill: dict[int, tuple[float, float]] = {}
        self._decode: dict[int, tuple[float, float]] = {}

    def size(self, workers: Counts) -> Size:
        """Of at least one worker of each role."""
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


def smallest(estimate: Estimate, targets: Targets, bounds: Bounds) -> Size:
    """The fewest GPUs with which the share of requests that is to meet both targets does; among equals the
    choice with the fewest late. What may be late is not split between the roles beforehand: the choice is of
    both at once. If nothing within the bounds is enough, the choice with the fewest late, or the one that
    is overrun least."""
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
                break  # more of them would help nobody
        if found is not None and found.late_prefill < SAME * allowed and found.late <= allowed:
            break
    assert found is not None  # Bounds has seen to it
    return found


def _better(one: Size, other: Size, allowed: float, bounds: Bounds) -> bool:
    enough = one.late <= allowed
    if enough != (other.late <= allowed):
        return enough
    if not enough and abs(one.late - other.late) > SAME:
        return one.late < other.late
    if not enough:
        return (one.pressure, one.other_pressure) < (other.pressure, other.other_pressure)
    cost, others = bounds.gpus(one.workers), bounds.gpus(other.workers)
    return (cost, one.late) < (others, other.late)
