"""What the ranks of a model exchange in a forward pass.

Groups of torch that belong to their owner, never the default one. Every rank calls the same methods in the
same order, so a call needs no name.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor

from baton import sockets
from baton.parallel.layout import LOOPBACK
from baton.parallel.shard import ModelSizes, Shard

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, Work

MEET = timedelta(seconds=60)
"""Until all ranks have connected to each other."""
LONGEST = timedelta(minutes=10)
"""Until a rank that lives and says nothing is given up. A dead one is found at once."""
_MESSAGE, _SUM = range(2)
"""Gloo's tags."""


class Collectives(Protocol):
    """What models need of the other ranks."""

    def sum(self, partial: Tensor) -> Tensor:
        """The sum of what each rank of the tensor-parallel group gives, the same on all; may be in place."""

    def pass_on(self, x: Tensor) -> None:
        """Sends x to the next stage."""

    def take_over(self, x: Tensor) -> Tensor:
        """x, filled with what the stage before passes on."""

    def collect(self, logits: Tensor) -> Tensor:
        """[R, own part of the vocabulary] of each rank of the last stage -> [R, vocabulary] on the leader.
        What ranks of other stages give tells only type, device and R, and what comes back but on the leader
        is worth nothing."""


class Alone:
    """A model in one process."""

    def sum(self, partial: Tensor) -> Tensor:
        return partial

    def pass_on(self, x: Tensor) -> None:
        raise AssertionError("there is no next stage")

    def take_over(self, x: Tensor) -> Tensor:
        raise AssertionError("there is no stage before")

    def collect(self, logits: Tensor) -> Tensor:
        return logits


@dataclass(frozen=True, slots=True)
class Parallel:
    """A rank's part of a model, and its way to the others."""

    shard: Shard
    collectives: Collectives

    @classmethod
    def alone(cls, sizes: ModelSizes) -> Parallel:
        """All of it, in one process."""
        return cls(Shard.whole(sizes), Alone())


class _Group(Protocol):
    """What torch's groups have, which its stubs leave out."""

    def allreduce(self, tensors: list[Tensor]) -> Work: ...

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Work: ...

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Work: ...

    def abort(self) -> None: ...


class GroupCollectives:
    """``Collectives`` over process groups of torch: NCCL on CUDA, gloo on the CPU. RuntimeError (torch's own
    errors derive from it) when a rank is gone.

    One group of all ranks for what goes from one to another. On CUDA, sums have a group of their own for each
    tensor-parallel group. On the CPU the first rank of the group adds up what the others send it and sends
    them the sum: gloo's own all-reduce takes several times as long (docs/parallelism.md).
    """

    def __init__(self, shard: Shard, device: torch.device, host: str = LOOPBACK) -> None:
        """``host``: where ranks of other nodes reach this one."""
        self._shard = shard
        self._device = device
        self._host = host
        self._world: _Group | None = None
        self._sums: _Group | None = None

    def connect(self, store: Store) -> None:
        """Meets the other ranks, which do the same with the same store."""
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        shard = self._shard
        world = _group(PrefixStore("world", store), shard.rank, shard.world, self._device, self._host)
        self._world = world
        if self._device.type == "cuda" and shard.tp_size > 1:
            name = f"tp{shard.pp_rank}"
            self._sums = _group(
                PrefixStore(name, store), shard.tp_rank, shard.tp_size, self._device, self._host
            )

    def sum(self, partial: Tensor) -> Tensor:
        shard = self._shard
        if self._sums is not None:
            self._sums.allreduce([partial]).wait()
            return partial
        if shard.tp_size == 1:
            return partial
        first = shard.pp_rank * shard.tp_size
        return self._sum_at_first(partial, first, range(first + 1, first + shard.tp_size))

    def _sum_at_first(self, partial: Tensor, first: int, others: range) -> Tensor:
        world = self._world
        assert world is not None
        if self._shard.rank != first:
            world.send([partial], first, _SUM).wait()
            world.recv([partial], first, _SUM).wait()
            return partial
        parts = [torch.empty_like(partial) for _ in others]
        _wait([world.recv([part], rank, _SUM) for part, rank in zip(parts, others, strict=True)])
        total = partial.float()
        for part in parts:
            total = total + part
        total = total.to(partial.dtype)
        _wait([world.send([total], rank, _SUM) for rank in others])
        return total

    def pass_on(self, x: Tensor) -> None:
        assert self._world is not None
        self._world.send([x], self._shard.rank + self._shard.tp_size, _MESSAGE).wait()

    def take_over(self, x: Tensor) -> Tensor:
        assert self._world is not None
        self._world.recv([x], self._shard.rank - self._shard.tp_size, _MESSAGE).wait()
        return x

    def collect(self, logits: Tensor) -> Tensor:
        assert self._world is not None
        shard = self._shard
        if shard.rank == 0:
            parts = [
                logits if rank == 0 else logits.new_empty(len(logits), len(shard.vocab_parts[at]))
                for at, rank in enumerate(shard.last_stage)
            ]
            for part, rank in zip(parts, shard.last_stage, strict=True):
                if rank != 0:
                    self._world.recv([part], rank, _MESSAGE).wait()
            return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        if shard.is_last_stage:
            self._world.send([logits.contiguous()], 0, _MESSAGE).wait()
        return logits

    def abort(self) -> None:
        """A rank is dead: nothing waits for it any more. From any thread. Gloo finds out by itself."""
        if self._device.type == "cuda":
            for group in (self._world, self._sums):
                if group is not None:
                    group.abort()


def _wait(under_way: list[Work]) -> None:
    for work in under_way:
        work.wait()


def listening_store(world: int, host: str = LOOPBACK) -> tuple[Store, int]:
    """A store at which the ranks meet, and its port on ``host``, on which alone it listens: it asks nobody
    who they are."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    listener = sockets.listen(host, 0)
    port = listener.getsockname()[1]
    store = TCPStore(
        host, port, world, True, MEET, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def store_at(host: str, port: int, world: int) -> Store:
    """The leader's store."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store: Store = TCPStore(host, port, world, False, MEET, wait_for_workers=False)
    return store


def _group(store: Store, rank: int, size: int, device: torch.device, host: str) -> _Group:
    group: object
    if device.type == "cuda":
        from torch.distributed import ProcessGroupNCCL

        nccl = ProcessGroupNCCL.Options()
        nccl._timeout = LONGEST
        group = ProcessGroupNCCL(store, rank, size, nccl)
        return cast(_Group, group)
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = LONGEST
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    group = ProcessGroupGloo(store, rank, size, options)
    return cast(_Group, group)
