"""The host tier's index: which evicted blocks are in host memory, and what is to be copied before the next
step.

A second level under the block pool's prefix index. A block that the pool gives away is copied to a slot here,
and comes back by copy when its digest is asked for; it keeps its slot then, so that being evicted again costs
nothing. The least recently used block goes first. Knows ids only; the bytes are in
``baton.engine.kv.host_memory``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from baton.engine.kv.break_even import BreakEven
from baton.process.exported import Counters, counter, gauge


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Copies in the order in which they must be made: all of ``saves``, then all of ``restores``. No slot and
    no block is written twice."""

    saves: dict[int, int] = field(default_factory=dict)
    """Slot to write → block to read."""
    restores: dict[int, int] = field(default_factory=dict)
    """Block to write → slot to read."""

    def __bool__(self) -> bool:
        return bool(self.saves or self.restores)


@dataclass
class TierCounters(Counters):
    """Counts of blocks since the start."""

    restored: Annotated[int, counter("baton_host_kv_hit_blocks", "KV blocks that came back by copy.")] = 0
    """Blocks copied back from the host: hits."""
    saved: Annotated[int, counter("baton_host_kv_saved_blocks", "KV blocks evicted into it.")] = 0
    """Blocks copied to the host."""
    evicted: Annotated[int, counter("baton_host_kv_evicted_blocks", "KV blocks evicted from it.")] = 0
    """Blocks that lost their slot to other blocks."""
    dropped: Annotated[
        int,
        counter(
            "baton_host_kv_dropped_blocks",
            "KV blocks evicted and not saved, as all of it was about to be read.",
        ),
    ] = 0
    """Blocks evicted from the pool and not saved, as every slot was about to be read."""


@dataclass
class CopiedBytes(Counters):
    """Counts of bytes copied since the start, on all ranks together."""

    saved: Annotated[int, counter("baton_host_kv_saved_bytes", "Bytes copied to host memory.")] = 0
    restored: Annotated[int, counter("baton_host_kv_restored_bytes", "Bytes copied back.")] = 0


@dataclass(frozen=True, slots=True)
class HostTierStats:
    """The host tier at one moment; all zero without one. The counters are copies: their owners count on."""

    used: Annotated[int, gauge("baton_host_kv_blocks_used", "KV blocks in host memory.")] = 0
    slots: Annotated[
        int, gauge("baton_host_kv_blocks_capacity", "KV blocks that host memory has room for.")
    ] = 0
    blocks: TierCounters = field(default_factory=TierCounters)
    copied: CopiedBytes = field(default_factory=CopiedBytes)


class HostTier:
    """Slots of host memory by the digest of the block in them, the least recently used first.

    Not locked: the engine's lock guards it, with the pool. A caller that makes the pool evict or asks for a
    restore must have the plan carried out under the same hold of the lock: when the lock is free, blocks may
    be written to.
    """

    def __init__(self, num_slots: int, break_even: BreakEven) -> None:
        self.num_slots = num_slots
        self.break_even = break_even
        self.counters = TierCounters()
        self._slots: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()
        self._free = list(range(num_slots - 1, -1, -1))
        self._reading: set[bytes] = set()
        """Digests that were found and are not copied yet: their slots must not be reused."""
        self._plan = CopyPlan()

    @property
    def num_used(self) -> int:
        """Slots with content."""
        return self.num_slots - len(self._free)

    def stats(self, copied: CopiedBytes) -> HostTierStats:
        """The tier's figures. ``copied``: the bytes copied, which the owner of the memory counts."""
        return HostTierStats(self.num_used, self.num_slots, self.counters.copy(), copied.copy())

    def find(self, digest: bytes) -> tuple[int, ...] | None:
        """The slots with this content, one for each of its pages, or None."""
        return self._slots.get(digest)

    def save(self, pages: Sequence[int], digest: bytes) -> None:
        """Keeps a copy of ``pages``, which the pool gives away and in which it had ``digest``."""
        if digest in self._slots:
            self._slots.move_to_end(digest)
            return
        slots = self._take_slots(len(pages))
        if slots is None:
            self.counters.dropped += len(pages)
            return
        self._slots[digest] = slots
        self._plan.saves.update(zip(slots, pages, strict=True))
        self.counters.saved += len(pages)

    def keep(self, digests: Iterable[bytes]) -> None:
        """Protects found blocks from eviction until the plan has been taken: they are about to be
        restored."""
        for digest in digests:
            self._slots.move_to_end(digest)
            self._reading.add(digest)

    def restore(self, digest: bytes, pages: Sequence[int]) -> None:
        """Plans to copy the slots kept under ``digest`` into ``pages``, which are not written to yet."""
        self._plan.restores.update(zip(pages, self._slots[digest], strict=True))
        self.counters.restored += len(pages)

    def take_plan(self) -> CopyPlan:
        """The copies to make now; from here on, they count as made."""
        plan, self._plan = self._plan, CopyPlan()
        self._reading.clear()
        return plan

    def _take_slots(self, count: int) -> tuple[int, ...] | None:
        """``count`` free slots, for which the least recently used content is given up; None if all of it is
        about to be read."""
        if count > self.num_slots:
            return None
        while len(self._free) < count:
            oldest = next(iter(self._slots))
            if oldest in self._reading:  # so is, or was just saved, everything after it
                return None
            given_up = self._slots.pop(oldest)
            self.counters.evicted += len(given_up)
            self._free += reversed(given_up)
        return tuple(self._free.pop() for _ in range(count))
