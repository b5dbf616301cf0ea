"""KV transfers of small stand-ins, which take as long as the KV that they stand for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

import numpy as np

from baton.simulated.runner import Words
from baton.transport.base import BlockForm, DeviceView, GroupPart, PageMemory
from baton.transport.ranks.endpoint import ChannelShape, DataLink, LocalEndpoint
from baton.transport.ranks.shard import KVShard


class WordMemory:
    """``baton.transport.base.KVMemory`` over a pool of words, [num_blocks, block_size]."""

    def __init__(self, pool: Words) -> None:
        self._pool = pool

    def part(
        self, block_size: int, parts: Sequence[GroupPart] | None = None, arrives_as: str = ""
    ) -> PageMemory:
        """Return the pool as wire blocks of ``block_size`` tokens. Raises ValueError for a size that does not
        divide the pool's, for heads or layers other than the pool's only ones, and for other types."""
        if arrives_as:
            raise ValueError(f"arrives_as {arrives_as!r}: a simulated worker converts nothing")
        page = self._pool.shape[1]
        if block_size < 1 or page % block_size:
            raise ValueError(f"block_size {block_size} does not divide the pool's block size, {page}")
        if parts is not None and tuple(parts) != (GroupPart(range(1), range(1)),):
            raise ValueError(f"{parts}: a simulated worker has one head of one layer of one group")
        return _Part(self._pool.reshape(-1, block_size))


class _Part:
    def __init__(self, blocks: Words) -> None:
        self._blocks = blocks
        self._form = BlockForm(1, blocks.shape[1] * blocks.itemsize)

    def form_of(self, blocks: Sequence[int]) -> BlockForm:
        return self._form

    def in_place(self, blocks: Sequence[int]) -> list[memoryview]:
        self._check(blocks)
        return [self._blocks[block].data.cast("B") for block in blocks]

    def on_device(self, blocks: Sequence[int]) -> list[DeviceView]:
        return []

    def whole(self) -> memoryview:
        return self._blocks.data.cast("B")

    def gather(self, blocks: Sequence[int], into: memoryview | DeviceView) -> None:
        self._check(blocks)
        assert isinstance(into, memoryview)
        into[:] = self._blocks[list(blocks)].data.cast("B")

    def scatter(self, blocks: Sequence[int], piece: memoryview | DeviceView) -> None:
        self._check(blocks)
        assert isinstance(piece, memoryview)
        words = np.frombuffer(piece, np.uint64).reshape(len(blocks), -1)
        self._blocks[list(blocks)] = words

    def _check(self, blocks: Sequence[int]) -> None:
        if not blocks or min(blocks) < 0 or max(blocks) >= len(self._blocks):
            raise ValueError(f"wire blocks {list(blocks)}: ids of 0 to {len(self._blocks) - 1} are allowed")


class PacedEnd(LocalEndpoint):
    """The endpoint of a worker whose links share ``bytes_per_s``, for KV that would weigh
    ``bytes_per_token``."""

    def __init__(self, end: LocalEndpoint, bytes_per_token: int, bytes_per_s: float) -> None:
        self._end = end
        self._bytes_per_token = bytes_per_token
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self.share: KVShard = end.share
        self.connectors = end.connectors
        self.drained_is_proof = end.drained_is_proof

    async def listen(self, host: str, port: int) -> Mapping[str, str]:
        return await self._end.listen(host, port)

    def expect(
        self, connector: str, token: bytes, cut: ChannelShape, on_lost: Callable[[], None]
    ) -> DataLink:
        return self._paced(self._end.expect(connector, token, cut, on_lost), cut)

    async def connect(
        self, connector: str, address: str, token: bytes, cut: ChannelShape, on_lost: Callable[[], None]
    ) -> DataLink:
        return self._paced(await self._end.connect(connector, address, token, cut, on_lost), cut)

    def _paced(self, link: DataLink, cut: ChannelShape) -> DataLink:
        return PacedLink(link, cut.block_size * self._bytes_per_token, self.reserve)

    def reserve(self, size: int) -> float:
        """Queue ``size`` bytes behind those sent before; return the seconds until they have left."""
        now = time.monotonic()
        self._free_at = max(now, self._free_at) + size / self._bytes_per_s
        return self._free_at - now

    async def close(self) -> None:
        await self._end.close()


class PacedLink:
    """A ``DataLink`` that delays each send by the time that the KV's transfer would take."""

    def __init__(self, link: DataLink, block_bytes: int, reserve: Callable[[int], float]) -> None:
        self._link = link
        self._reserve = reserve
        self._block_bytes = block_bytes

    def size_of(self, blocks: Sequence[int]) -> int:
        return len(blocks) * self._block_bytes

    def send(self, tag: int, blocks: Sequence[int]) -> Awaitable[None]:
        return self._send(self._reserve(self.size_of(blocks)), tag, blocks)

    async def _send(self, seconds: float, tag: int, blocks: Sequence[int]) -> None:
        await asyncio.sleep(seconds)
        await self._link.send(tag, blocks)

    async def checksum(self, blocks: Sequence[int]) -> int:
        return await self._link.checksum(blocks)

    def in_place(self) -> Awaitable[None] | None:
        return self._link.in_place()

    def post_receive(self, tag: int, blocks: Sequence[int]) -> Awaitable[None]:
        return self._link.post_receive(tag, blocks)

    def cancel_receive(self, tag: int) -> bool:
        return self._link.cancel_receive(tag)

    async def close(self) -> None:
        await self._link.close()
