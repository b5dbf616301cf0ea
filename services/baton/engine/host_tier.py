"""The host tier's index: which evicted blocks are in host memory, and what is to be copied before the next
step.

A second level under the block pool's prefix index. What the pool gives away is copied to a slot here, and
comes back by copy when its digest is asked for; it keeps its slot then, so that being evicted again costs
nothing. The least recently used goes first. Knows ids only; the bytes are in ``baton.engine.host_memory``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from baton.engine.break_even import BreakEven


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Copies in the order in which they must be made: all of ``saves``, then all of ``restores``. Nothing is
    written twice."""

    saves: dict[int, int] = field(default_factory=dict)
    """Slot to write → block to read."""
    restores: dict[int, int] = field(default_factory=dict)
    """Block to write → slot to read."""

    def __bool__(self) -> bool:
        return bool(self.saves or self.restores)


@dataclass(slots=True)
class TierCounters:
    """Since the start, in blocks."""

    saved: int = 0
    """Copied to the host."""
    restored: int = 0
    """Copied back: hits."""
    evicted: int = 0
    """Given up for others."""
    dropped: int = 0
    """Evicted from the pool and not saved, as every slot was about to be read."""


class HostTier:
    """Slots of host memory by the digest of the block in them, the least recently used first.

    Not locked: the engine's lock guards it, with the pool. Under one hold of it, whoever makes the pool evict
    or asks for a restore must see to it that the plan is carried out: when the lock is free, blocks may be
    written to.
    """

    def __init__(self, num_slots: int, break_even: BreakEven) -> None:
        self.num_slots = num_slots
        self.break_even = break_even
        self.counters = TierCounters()
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(range(num_slots - 1, -1, -1))
        self._reading: set[bytes] = set()
        """Found and not copied yet: their slots must not be given to others."""
        self._plan = CopyPlan()

    @property
    def num_used(self) -> int:
        return len(self._slots)

    def find(self, digest: bytes) -> int | None:
        """The slot with this content."""
        return self._slots.get(digest)

    def save(self, block: int, digest: bytes) -> None:
        """The pool gives ``block`` away, in which it had ``digest``: keep a copy."""
        if digest in self._slots:
            self._slots.move_to_end(digest)
            return
        slot = self._take_slot()
        if slot is None:
            self.counters.dropped += 1
            return
        self._slots[digest] = slot
        self._plan.saves[slot] = block
        self.counters.saved += 1

    def keep(self, digests: Iterable[bytes]) -> None:
        """Do not evict what was found until the plan has been taken: it is about to be restored."""
        for digest in digests:
            self._slots.move_to_end(digest)
            self._reading.add(digest)

    def restore(self, digests: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Copy what is kept under ``digests`` into ``blocks``, which nobody has written to yet."""
        for digest, block in zip(digests, blocks, strict=True):
            self._plan.restores[block] = self._slots[digest]
        self.counters.restored += len(blocks)

    def take_plan(self) -> CopyPlan:
        """What has to be copied now; from here on, it counts as done."""
        plan, self._plan = self._plan, CopyPlan()
        self._reading.clear()
        return plan

    def _take_slot(self) -> int | None:
        if self._free:
            return self._free.pop()
        oldest = next(iter(self._slots))
        if oldest in self._reading:  # and so is, or was just saved, everything after it
            return None
        self.counters.evicted += 1
        return self._slots.pop(oldest)
