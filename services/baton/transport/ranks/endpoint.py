"""One rank's end of its worker's links."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.transport.base import Connector, KVMemory, Link, PageMemory
from baton.transport.checksum import checksum
from baton.transport.ranks.shard import KVShard

_LAST_PORT = 65535


class DataLink(Link, Protocol):
    """A link together with the part of the KV that it moves, in whatever process that is."""

    def size_of(self, blocks: Sequence[int]) -> int:
        """Return the size of these wire blocks in bytes, of all heads and layers that the link moves; 0 if it
        moves nothing of their group."""

    async def checksum(self, blocks: Sequence[int]) -> int:
        """Return the CRC-32 of these wire blocks as they lie here. The blocks must be pinned until it is
        done. Raises TransferError if the checksum cannot be had."""

    def in_place(self) -> Awaitable[None] | None:
        """Return an awaitable to wait for before the peer may hear of the calls made on the link so far
        (``expect``, ``post_receive``); None if all of them have taken effect where they must. The awaitable
        never fails: if the link is lost meanwhile, there is nothing to wait for."""


@dataclass(frozen=True, slots=True)
class RankAddress:
    """The hosts by which a rank's process is reached."""

    host: str
    """The host that the rank listens on."""
    advertised: str
    """The host that the rank's peers connect to."""


@dataclass(frozen=True, slots=True)
class ChannelShape:
    """The shape of a data connection: wire blocks of ``block_size`` tokens, and a shard of the model's KV."""

    block_size: int
    share: KVShard
    arrives_as: str = ""
    """The type of K and V on it, at an end that converts them; empty: that of the end's own pool."""


class RankEndpoint(Protocol):
    """One rank of this worker: its connectors over its own pool."""

    @property
    def share(self) -> KVShard:
        """The part of the model's KV that its pool holds."""

    @property
    def connectors(self) -> Sequence[str]:
        """The connectors' names, the best first."""

    @property
    def drained_is_proof(self) -> bool:
        """Whether ``Connector.drained_is_proof`` holds for all its connectors."""

    async def listen(self, host: str, port: int) -> Mapping[str, str]:
        """Accept data connections, the first connector on ``port`` and each other on the next (0: any).
        Returns host:port by connector. Raises OSError."""

    def expect(
        self, connector: str, token: bytes, cut: ChannelShape, on_lost: Callable[[], None]
    ) -> DataLink:
        """Make decode's end of a link, as ``Connector.expect`` does. Raises ValueError for a shape that the
        pool cannot be divided into."""

    async def connect(
        self, connector: str, address: str, token: bytes, cut: ChannelShape, on_lost: Callable[[], None]
    ) -> DataLink:
        """Make prefill's end of a link, as ``Connector.connect`` does. Raises ValueError for a shape that the
        pool cannot be divided into."""

    async def close(self) -> None: ...


class LocalLink:
    """``DataLink`` over a pool in this process."""

    def __init__(self, link: Link, memory: PageMemory) -> None:
        self._link = link
        self._memory = memory

    def size_of(self, blocks: Sequence[int]) -> int:
        return self._memory.form_of(blocks).size_of(blocks)

    async def checksum(self, blocks: Sequence[int]) -> int:
        return await checksum(self._memory, blocks)

    def in_place(self) -> Awaitable[None] | None:
        return None

    def post_receive(self, tag: int, blocks: Sequence[int]) -> Awaitable[None]:
        return self._link.post_receive(tag, blocks)

    def cancel_receive(self, tag: int) -> bool:
        return self._link.cancel_receive(tag)

    def send(self, tag: int, blocks: Sequence[int]) -> Awaitable[None]:
        return self._link.send(tag, blocks)

    async def close(self) -> None:
        await self._link.close()


class LocalEndpoint:
    """The rank of this process."""

    def __init__(self, connectors: Mapping[str, Connector], memory: KVMemory, share: KVShard) -> None:
        """``connectors``: by name, the best first. ``share``: the part of the model's KV that ``memory``
        holds."""
        self._connectors = connectors
        self._memory = memory
        self.share = share
        self.connectors = tuple(connectors)
        self.drained_is_proof = all(c.drained_is_proof for c in connectors.values())

    async def listen(self, host: str, port: int) -> Mapping[str, str]:
        last = port + len(self._connectors) - 1
        if last > _LAST_PORT:
            raise OSError(f"there are no ports {port} to {last} for its connectors")
        return {
            name: await connector.listen(host, port + offset if port else 0)
            for offset, (name, connector) in enumerate(self._connectors.items())
        }

    def expect(
        self, connector: str, token: bytes, cut: ChannelShape, on_lost: Callable[[], None]
    ) -> DataLink:
        memory = self._part(cut)
        return LocalLink(self._connectors[connector].expect(token, memory, on_lost), memory)

    async def connect(
        self, connector: str, address: str, token: bytes, cut: ChannelShape, on_lost: Callable[[], None]
    ) -> DataLink:
        memory = self._part(cut)
        link = await self._connectors[connector].connect(address, token, memory, on_lost)
        return LocalLink(link, memory)

    def _part(self, cut: ChannelShape) -> PageMemory:
        if not cut.share.within(self.share):
            raise ValueError(f"{cut.share}: of {self.share} are allowed, which this rank holds")
        return self._memory.part(cut.block_size, cut.share.seen_from(self.share).groups, cut.arrives_as)

    async def close(self) -> None:
        for connector in self._connectors.values():
            await connector.close()
