"""Handoffs by pair of prefill and decode worker, as the workers told the router."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

from baton.v1 import worker_pb2 as pb

MAX_PAIRS = 4096
"""Most pairs that are counted; those that handed over longest ago are forgotten."""


class WorkerPair(NamedTuple):
    """The two ends of a handoff, by address."""

    prefill: str
    decode: str


@dataclass(slots=True)
class PairCounts:
    """The handoffs of one pair, or of several together. Times are seconds that workers measured on their own
    clocks, summed over handoffs."""

    handoffs: int = 0
    """The handoffs that decode has committed."""
    bytes: int = 0
    """The bytes of KV blocks that arrived."""
    transfer_s: float = 0.0
    """The time from pages bound to the last block."""
    flush_s: float = 0.0
    """The time from the last chunk computed to the last send over."""
    commit_s: float = 0.0
    """The time from hearing of that end to the request being decode's."""
    joined: int = 0
    """The handed-over requests for which decode has computed a first step."""
    queue_s: float = 0.0
    """The time from the commit until that step began."""
    step_s: float = 0.0
    """The step itself."""

    def add(self, other: PairCounts) -> None:
        self.handoffs += other.handoffs
        self.bytes += other.bytes
        self.transfer_s += other.transfer_s
        self.flush_s += other.flush_s
        self.commit_s += other.commit_s
        self.joined += other.joined
        self.queue_s += other.queue_s
        self.step_s += other.step_s


class HandoffTally:
    """Counts handoffs by pair. Event loop's thread only."""

    def __init__(self) -> None:
        self.counts: OrderedDict[WorkerPair, PairCounts] = OrderedDict()
        """The pair that handed over longest ago is first."""
        self.total = PairCounts()
        """All handoffs, also those of pairs that are forgotten."""

    def tell(self, pair: WorkerPair, phases: pb.Phases) -> None:
        """Count what decode reports of a handoff: its phases, then those of the first step."""
        match phases.WhichOneof("part"):
            case "handoff":
                told = phases.handoff
                counts = PairCounts(
                    handoffs=1,
                    bytes=told.bytes,
                    transfer_s=told.transfer_us / 1e6,
                    flush_s=told.flush_us / 1e6,
                    commit_s=told.commit_us / 1e6,
                )
                self._add(pair, counts)
            case "join":
                step = phases.join
                counts = PairCounts(joined=1, queue_s=step.queue_us / 1e6, step_s=step.step_us / 1e6)
                self._add(pair, counts)

    def _add(self, pair: WorkerPair, told: PairCounts) -> None:
        self._of(pair).add(told)
        self.total.add(told)

    def _of(self, pair: WorkerPair) -> PairCounts:
        counts = self.counts.setdefault(pair, PairCounts())
        self.counts.move_to_end(pair)
        if len(self.counts) > MAX_PAIRS:
            self.counts.popitem(last=False)
        return counts
