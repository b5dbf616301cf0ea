"""One rank's end of its worker's links."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.connector.checksum import checksum
from baton.connector.ranks.share import Share
from baton.connector.transport import Connector, KVMemory, Link, PageMemory

_LAST_PORT = 65535


class DataLink(Link, Protocol):
    """A link together with the part of the KV that it moves, in whatever process that is."""

    @property
    def block_bytes(self) -> int:
        """Size of one wire block, of all heads and layers that the link moves."""

    async def checksum(self, blocks: Sequence[int]) -> int:
        """CRC-32 of these wire blocks as they lie here. They must be pinned until it is done. Raises
        TransferError if it cannot be had."""

    def in_place(self) -> Awaitable[None] | None:
        """Whether what was asked of the link so far (that a peer be expected, that receives be posted) is
        done where it must be: None if so, otherwise what to wait for before the peer may hear of it. It never
        fails: if the link is lost meanwhile, there is nothing to wait for."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank's process can be reached."""

    host: str
    """What it listens on."""
    advertised: str
    """What its peers call."""


@dataclass(frozen=True, slots=True)
class Cut:
    """What one data connection moves: wire blocks of so many tokens, and this of the model's KV."""

    block_size: int
    share: Share


class RankEnd(Protocol):
    """One rank of this worker: its connectors over its own pool."""

    @property
    def share(self) -> Share:
        """What of the model's KV its pool holds."""

    @property
    def connectors(self) -> Sequence[str]:
        """Names, the best first."""

    @property
    def drained_is_proof(self) -> bool:
        """As ``Connector.drained_is_proof``, of all its connectors."""

    async def listen(self, host: str, port: int) -> Mapping[str, str]:
        """Accept data connections, the first connector on ``port`` and each other on the next (0: any).
        Connector → host:port. Raises OSError."""

    def expect(self, connector: str, token: bytes, cut: Cut, on_lost: Callable[[], None]) -> DataLink:
        """As ``Connector.expect``. Raises ValueError for a cut that its pool cannot be divided into."""

    async def connect(
        self, connector: str, address: str, token: bytes, cut: Cut, on_lost: Callable[[], None]
    ) -> DataLink:
        """As ``Connector.connect``. Raises ValueError likewise."""

    async def close(self) -> None: ...


class LocalLink:
    """``DataLink`` over a pool in this process."""

    def __init__(self, link: Link, memory: PageMemory) -> None:
        self._link = link
        self._memory = memory

    @property
    def block_bytes(self) -> int:
        return self._memory.block_bytes

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


class LocalEnd:
    """The rank of this process."""

    def __init__(self, connectors: Mapping[str, Connector], memory: KVMemory, share: Share) -> None:
        """``connectors``: by name, the best first. ``share``: what ``memory`` is of the model's KV."""
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

    def expect(self, connector: str, token: bytes, cut: Cut, on_lost: Callable[[], None]) -> DataLink:
        memory = self._part(cut)
        return LocalLink(self._connectors[connector].expect(token, memory, on_lost), memory)

    async def connect(
        self, connector: str, address: str, token: bytes, cut: Cut, on_lost: Callable[[], None]
    ) -> DataLink:
        memory = self._part(cut)
        link = await self._connectors[connector].connect(address, token, memory, on_lost)
        return LocalLink(link, memory)

    def _part(self, cut: Cut) -> PageMemory:
        if not cut.share.within(self.share):
            raise ValueError(f"{cut.share}: of {self.share} are allowed, which this rank holds")
        here = cut.share.seen_from(self.share)
        return self._memory.part(cut.block_size, here.heads, here.layers)

    async def close(self) -> None:
        for connector in self._connectors.values():
            await connector.close()
