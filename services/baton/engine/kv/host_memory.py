"""The host tier's bytes, and the copies between them and the pool."""

from __future__ import annotations

import struct
import time
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from baton.engine.kv.break_even import BreakEven
from baton.engine.kv.host_tier import CopiedBytes, CopyPlan
from baton.engine.kv.streamed_copies import StreamedCopies
from baton.parallel.messages import CopyBlocks
from baton.parallel.ranks import Ranks


class HostMemory:
    """``[num_slots, ...]`` of host memory, each slot as large as a block of the pool. The other ranks of a
    model, which have slots of their own, make the same copies at the same time.

    All slots are allocated at the start, so that a lack of memory shows then and not under load. On CUDA the
    memory is pinned, and copies run behind their start (``StreamedCopies``).
    """

    def __init__(
        self,
        pool: Tensor,
        num_slots: int,
        break_even: BreakEven,
        ranks: Ranks | None = None,
        block_bytes: int | None = None,
    ) -> None:
        """``block_bytes``: bytes of a block on all ranks together; None: there is only this rank."""
        self._ranks = ranks
        self._block_bytes = pool[0].nbytes if block_bytes is None else block_bytes
        self._pool = pool
        self._break_even = break_even
        self._streamed: StreamedCopies | None = None
        if pool.device.type == "cuda":
            self._streamed = StreamedCopies(pool, num_slots, break_even)
            self._slots = self._streamed.slots
        else:
            self._slots = torch.empty((num_slots, *pool.shape[1:]), dtype=pool.dtype)
            self._slots.fill_(0)  # the system only promises memory that was never written to
        self.copied = CopiedBytes()

    def carry_out(self, plan: CopyPlan) -> None:
        """Makes all copies of a plan on all ranks, adjacent blocks in one go. They are complete on return.

        On CUDA they have only been started, on every rank or in the order of what the ranks are told:
        :meth:`join` and :meth:`settle` order others behind them.
        """
        if not plan:
            return
        began = time.perf_counter()
        self._everywhere(plan)
        if self._streamed is None:
            self._break_even.copied(len(plan.saves) + len(plan.restores), time.perf_counter() - began)
        self.copied.saved += len(plan.saves) * self._block_bytes
        self.copied.restored += len(plan.restores) * self._block_bytes

    def try_out(self) -> None:
        """Copies a block to a slot and back on all ranks, uncounted, while nobody owns either."""
        self._everywhere(CopyPlan({0: 0}, {0: 0}))
        self.settle((0,))

    def _everywhere(self, plan: CopyPlan) -> None:
        question = self._tell(plan)
        self.copy(plan)
        if question and self._ranks is not None:
            self._ranks.answers(question)

    def copy(self, plan: CopyPlan) -> None:
        """Makes the copies of :meth:`carry_out` on this rank alone."""
        if self._streamed is not None:
            self._streamed.start(plan)
            return
        _copy(self._slots, self._pool, plan.saves)
        _copy(self._pool, self._slots, plan.restores)

    def join(self) -> None:
        """Puts what the calling thread launches next on the pool's device behind the copies. Each step begins
        with it."""
        if self._streamed is not None:
            self._streamed.join()

    def settle(self, pages: Collection[int]) -> None:
        """Returns when no copy reads or writes these blocks of the pool, on this rank, any more: they may be
        written to by means other than a step. Any thread."""
        if self._streamed is not None:
            self._streamed.settle(pages)

    def _tell(self, plan: CopyPlan) -> int:
        if self._ranks is None:
            return 0
        question = 0 if self._streamed is not None else self._ranks.question()
        message = CopyBlocks(question, len(plan.saves), len(plan.restores))
        self._ranks.tell(message, plan_to_bytes(plan))
        return question


def _copy(target: Tensor, source: Tensor, moves: Mapping[int, int]) -> None:
    """``moves``: index in ``target`` -> index in ``source``."""
    for to, origin, count in _runs(moves.items()):
        target[to : to + count].copy_(source[origin : origin + count])


def plan_to_bytes(plan: CopyPlan) -> bytes:
    """The pairs of a plan, saves first, as int64."""
    pairs = (*plan.saves.items(), *plan.restores.items())
    return array("q", (number for pair in pairs for number in pair)).tobytes()


def plan_from_bytes(num_saves: int, data: bytes | bytearray) -> CopyPlan:
    """The plan that ``plan_to_bytes`` packed, with ``num_saves`` saves."""
    pairs = list(struct.iter_unpack("=qq", data))
    return CopyPlan(dict(pairs[:num_saves]), dict(pairs[num_saves:]))


def _runs(moves: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """``(to, from, count)`` of each run of moves that is adjacent at both ends."""
    start, count = (0, 0), 0
    for to, source in moves:
        if count and (to, source) == (start[0] + count, start[1] + count):
            count += 1
            continue
        if count:
            yield *start, count
        start, count = (to, source), 1
    if count:
        yield *start, count
