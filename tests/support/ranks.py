"""Workers of several ranks, as far as their links go: pools that a test fills and compares."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from baton.transport import registry
from baton.transport.base import ConnectorSettings, KVMemory
from baton.transport.pool_memory import PoolMemory
from baton.transport.ranks.endpoint import DataLink, LocalEndpoint, RankAddress, RankEndpoint
from baton.transport.ranks.endpoints import DataChannel, RankEndpoints
from baton.transport.ranks.remote import RemoteEndpoint
from baton.transport.ranks.shard import KVShard, slices
from baton.transport.staging import Staging
from tests.support.rank_process import RankProcesses, mapped

HEAD_DIM = 4
HERE = RankAddress("127.0.0.1", "127.0.0.1")


def shares(tp: int, heads: int, layers: int, pp: int = 1) -> list[KVShard]:
    """What the ranks of a worker hold: KV heads split, or replicated if there are more ranks than heads."""
    per_rank, replicas = max(1, heads // tp), max(1, tp // heads)
    stages = [range(layers * stage // pp, layers * (stage + 1) // pp) for stage in range(pp)]
    firsts = [rank // replicas * per_rank for rank in range(tp)]
    return [KVShard.of_one(range(first, first + per_rank), stage) for stage in stages for first in firsts]


def random_kv(num_blocks: int, heads: int, layers: int, block_size: int, seed: int = 1) -> Tensor:
    """A whole model's pool."""
    shape = (num_blocks, heads, layers, 2, block_size, HEAD_DIM)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def cut(kv: Tensor, share: KVShard) -> Tensor:
    """What a rank holds of it."""
    [part] = share.groups
    heads, layers = part.heads, part.layers
    return kv[:, heads.start : heads.stop, layers.start : layers.stop]


def tokens(kv: Tensor) -> Tensor:
    """[heads, layers, 2, tokens, dim], whatever the block size."""
    return kv.permute(1, 2, 3, 0, 4, 5).flatten(3, 4)


@dataclass
class Side:
    """One worker's ranks with their pools, which are parts of one model's KV."""

    ranks: RankEndpoints
    pools: list[Tensor]
    members: list[RankEndpoint]
    pids: list[int] = field(default_factory=list)
    """Of ranks 1 and on, if they are processes."""
    addresses: Sequence[str] = ()

    async def close(self) -> None:
        await self.ranks.close()


Wrap = Callable[[KVMemory], KVMemory]


async def side(
    connector: str,
    kv: Tensor,
    held: Sequence[KVShard],
    *,
    listens: bool,
    processes: tuple[RankProcesses, Path] | None = None,
    on_crash: Callable[[], None] = lambda: None,
) -> Side:
    """``kv``: what the pools hold together. ``processes``: where the ranks but the first live, and a folder
    for their pools; all are in this process otherwise."""
    pools: list[Tensor] = []
    members: list[RankEndpoint] = []
    pids: list[int] = []
    for number, share in enumerate(held):
        part = cut(kv, share).contiguous()
        if processes is None or number == 0:
            settings = ConnectorSettings(Staging(), on_crash, "127.0.0.1")
            connectors = registry.available(connector, settings)
            pools.append(part)
            members.append(LocalEndpoint(connectors, PoolMemory(part), share))
            continue
        starter, folder = processes
        path = folder / f"pool-{os.urandom(8).hex()}"
        pools.append(mapped(path, part.shape))
        pools[-1].copy_(part)
        ours, theirs = socket.socketpair()
        pids.append(starter.start(theirs, path, part.shape, share))
        members.append(
            await RemoteEndpoint.meet(ours, connector=connector, host="127.0.0.1", on_crash=on_crash)
        )
    made = Side(RankEndpoints(members), pools, members, pids)
    if listens:
        made.addresses = (await made.ranks.listen([HERE] * len(members), 0))[connector]
    return made


@dataclass
class Linked:
    """Both ends of one link."""

    sender: DataLink
    receiver: DataLink
    channels: Sequence[DataChannel]
    lost: list[str] = field(default_factory=list)

    async def close(self) -> None:
        await asyncio.gather(self.sender.close(), self.receiver.close())


async def link(connector: str, prefill: Side, decode: Side, block_size: int) -> Linked:
    """As the handshake does it."""
    lost: list[str] = []
    made = decode.ranks.channels(slices(prefill.ranks.shares, decode.ranks.shares), decode.addresses)
    receiver = decode.ranks.expect(connector, block_size, made, lambda: lost.append("receiver"))
    await in_place(receiver)
    sender = await prefill.ranks.connect(connector, block_size, made, lambda: lost.append("sender"))
    return Linked(sender, receiver, made, lost)


async def in_place(data: DataLink) -> None:
    waiting = data.in_place()
    if waiting is not None:
        await waiting
