"""The collective operations of a model's ranks in a forward pass.

Groups of torch that belong to their owner, never the default one. Every rank calls the same methods in the
same order, so a call needs no name.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor

from baton.net import sockets
from baton.parallel.layout import LOOPBACK
from baton.parallel.one_shot import MOST_BYTES, OneShotSum, agreed, share_buffer, why_not
from baton.parallel.shard import ModelSizes, Shard

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, Work

log = logging.getLogger(__name__)

MEET = timedelta(seconds=60)
"""The time until all ranks must have connected to each other."""
LONGEST = timedelta(minutes=10)
"""The time until a rank that lives and sends nothing is given up. A dead rank is found at once."""
_MESSAGE, _SUM = range(2)
"""Tags for gloo."""


class Collectives(Protocol):
    """The collective operations that models call."""

    def sum(self, partial: Tensor) -> Tensor:
        """The sum of the ``partial`` of each rank of the tensor-parallel group, the same on all; may be in
        place."""

    def pass_on(self, x: Tensor) -> None:
        """Sends x to the next stage."""

    def take_over(self, x: Tensor) -> Tensor:
        """Fills x with the tensor that the stage before passes on, and returns it."""

    def collect(self, logits: Tensor) -> Tensor:
        """[R, own part of the vocabulary] of each rank of the last stage -> [R, vocabulary] on the leader.
        The logits that ranks of other stages give tell only type, device and R; the result is meaningless
        except on the leader."""


class Alone:
    """The collectives of a model in one process."""

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
    """A rank's part of a model, and its collectives."""

    shard: Shard
    collectives: Collectives

    @classmethod
    def alone(cls, sizes: ModelSizes) -> Parallel:
        """The whole model, in one process."""
        return cls(Shard.whole(sizes), Alone())


class _Group(Protocol):
    """Methods of torch's groups, which its stubs leave out."""

    def allreduce(self, tensors: list[Tensor]) -> Work: ...

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Work: ...

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Work: ...

    def abort(self) -> None: ...


class GroupCollectives:
    """``Collectives`` over process groups of torch: NCCL on CUDA, gloo on the CPU. RuntimeError (torch's own
    errors derive from it) when a rank is gone.

    Messages between single ranks go over one group of all ranks. On CUDA, sums have a group of their own for
    each tensor-parallel group, and small ones take one kernel where the devices see each other's memory
    (``one_shot``). On the CPU the first rank of the group adds up the tensors that the others
    send it and sends them the sum: gloo's own all-reduce takes several times as long (docs/parallelism.md).
    """

    def __init__(
        self, shard: Shard, device: torch.device, host: str = LOOPBACK, per_node: int | None = None
    ) -> None:
        """``host``: the address at which ranks of other nodes reach this one; ``per_node``: the ranks of each
        node, None: all."""
        self._per_node = per_node or shard.world
        self._one_shot: OneShotSum | None = None
        self._shard = shard
        self._device = device
        self._host = host
        self._world: _Group | None = None
        self._sums: _Group | None = None

    def connect(self, store: Store) -> None:
        """Connects to the other ranks, which do the same with the same store."""
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        shard = self._shard
        world = _group(PrefixStore("world", store), shard.rank, shard.world, self._device, self._host)
        self._world = world
        if self._device.type == "cuda" and shard.tp_size > 1:
            name = f"tp{shard.pp_rank}"
            self._sums = _group(
                PrefixStore(name, store), shard.tp_rank, shard.tp_size, self._device, self._host
            )
            self._one_shot = self._share(PrefixStore(f"one-shot-{name}", store), f"baton-{name}")

    def _share(self, store: Store, name: str) -> OneShotSum | None:
        """The sum of small tensors, if all ranks of the tensor-parallel group have what it needs."""
        shard, here = self._shard, self._device.index
        first = shard.pp_rank * shard.tp_size
        on_one_node = first // self._per_node == (first + shard.tp_size - 1) // self._per_node
        neighbours = [here - shard.tp_rank + rank for rank in range(shard.tp_size)]
        devices = [here, *(one for one in neighbours if one != here)]
        reason, made = why_not(devices, on_one_node), None
        if agreed(reason, self._count, shard.tp_size):
            try:
                made = share_buffer(store, name, shard.tp_rank, shard.tp_size, self._device)
            except RuntimeError as error:
                reason = str(error).partition("\n")[0]
            if agreed(reason, self._count, shard.tp_size):
                log.info(
                    "sums of up to %d bytes take one kernel, larger ones NCCL", MOST_BYTES[shard.tp_size]
                )
                return made
        log.info("all sums take NCCL: %s", reason or "another rank cannot sum in one kernel")
        return None

    def _count(self, number: int) -> int:
        """The sum of a number over the tensor-parallel group."""
        assert self._sums is not None
        total = torch.tensor([number], dtype=torch.int32, device=self._device)
        self._sums.allreduce([total]).wait()
        return int(total)

    def sum(self, partial: Tensor) -> Tensor:
        shard = self._shard
        if self._one_shot is not None and self._one_shot.takes(partial):
            return self._one_shot(partial)
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
        """Ends all waiting for a rank that is dead. Any thread. Gloo detects the death by itself."""
        if self._device.type == "cuda":
            for group in (self._world, self._sums):
                if group is not None:
                    group.abort()


def _wait(under_way: list[Work]) -> None:
    for work in under_way:
        work.wait()


def listening_store(world: int, host: str = LOOPBACK) -> tuple[Store, int]:
    """A store through which the ranks connect, and its port on ``host``. It listens on ``host`` alone, as it
    authenticates nobody."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    listener = sockets.listen(host, 0)
    port = listener.getsockname()[1]
    store = TCPStore(
        host, port, world, True, MEET, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def store_at(host: str, port: int, world: int) -> Store:
    """A client of the leader's store."""
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
