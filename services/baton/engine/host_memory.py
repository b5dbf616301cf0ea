"""The host tier's bytes, and the copies between them and the pool."""

from __future__ import annotations

import struct
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext

import torch
from torch import Tensor

from baton.engine.break_even import BreakEven
from baton.engine.host_tier import CopyPlan
from baton.parallel.messages import CopyBlocks
from baton.parallel.ranks import Ranks
from baton_kernels.blocks import copy_blocks


class HostMemory:
    """``[num_slots, ...]`` of host memory, each slot as large as a block of the pool. The other ranks of a
    model, which have slots of their own, make the same copies at the same time.

    All of it is had at the start, so that what does not fit fails then and not under load. It is pinned for a
    pool on CUDA.
    """

    def __init__(
        self,
        pool: Tensor,
        num_slots: int,
        break_even: BreakEven,
        ranks: Ranks | None = None,
        block_bytes: int | None = None,
    ) -> None:
        """``block_bytes``: of a block on all ranks together; None: there is only this one."""
        self._ranks = ranks
        self._block_bytes = pool[0].nbytes if block_bytes is None else block_bytes
        on_cuda = pool.device.type == "cuda"
        self._pool = pool
        self._break_even = break_even
        self._slots = torch.empty((num_slots, *pool.shape[1:]), dtype=pool.dtype, pin_memory=on_cuda)
        self._slots.fill_(0)  # what was not written to is promised by the system, not had
        self._stream = torch.cuda.Stream(pool.device) if on_cuda else None  # type: ignore[no-untyped-call]
        self.saved_bytes = 0
        self.restored_bytes = 0

    def carry_out(self, plan: CopyPlan) -> None:
        """Makes all copies of a plan: on CUDA in one launch for each direction, elsewhere adjacent ones in
        one go. They are over on return, on all ranks.

        On CUDA they have a stream of their own and need not wait for a forward pass: none is using a block of
        the plan, as all had been given back, and what was written to them was complete by then.
        """
        if not plan:
            return
        began = time.perf_counter()
        question = self._tell(plan)
        self.copy(plan)
        if self._ranks is not None:
            self._ranks.answers(question)
        self._break_even.copied(len(plan.saves) + len(plan.restores), time.perf_counter() - began)
        self.saved_bytes += len(plan.saves) * self._block_bytes
        self.restored_bytes += len(plan.restores) * self._block_bytes

    def copy(self, plan: CopyPlan) -> None:
        """As :meth:`carry_out`, on this rank alone."""
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            self._copy(self._slots, self._pool, plan.saves)
            self._copy(self._pool, self._slots, plan.restores)
        if self._stream is not None:
            self._stream.synchronize()

    def _copy(self, target: Tensor, source: Tensor, moves: Mapping[int, int]) -> None:
        """``moves``: index in ``target`` -> index in ``source``."""
        if self._stream is None:
            for to, origin, count in _runs(moves.items()):
                target[to : to + count].copy_(source[origin : origin + count])
        elif moves:
            ids = torch.tensor([list(moves), list(moves.values())], device=self._pool.device)
            copy_blocks(target, ids[0], source, ids[1])

    def _tell(self, plan: CopyPlan) -> int:
        if self._ranks is None:
            return 0
        question = self._ranks.question()
        message = CopyBlocks(question, len(plan.saves), len(plan.restores))
        self._ranks.tell(message, plan_to_bytes(plan))
        return question


def plan_to_bytes(plan: CopyPlan) -> bytes:
    """The pairs of a plan, those of saves first, as int64."""
    pairs = (*plan.saves.items(), *plan.restores.items())
    return array("q", (number for pair in pairs for number in pair)).tobytes()


def plan_from_bytes(num_saves: int, data: bytes | bytearray) -> CopyPlan:
    """What ``plan_to_bytes`` made of a plan with so many saves."""
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
