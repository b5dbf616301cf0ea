"""The narrow interface of a connector: how KV blocks move, whatever the wire.

Transfers are two-sided. The receiver posts a receive into pages it owns and names it with a tag; the sender
sends to that tag. What was not posted is never written: the receiver alone decides what memory changes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


class TransferError(Exception):
    """A send or receive is over without its bytes: the link broke, was closed, or the peer sent nonsense."""


@dataclass(frozen=True, slots=True)
class DeviceView:
    """Adjacent bytes of a CUDA device's memory, as libraries that take such memory want it described. The
    pool outlives it."""

    device: int
    """Its index."""
    pointer: int
    nbytes: int

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """Version 3 of the interface, for bytes. No stream: a transfer is started when what was to be
        written is written."""
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.pointer, False), "version": 3}


class PageMemory(Protocol):
    """What one link sees of a KV pool: *wire blocks* of equal size, as bytes.

    Where both ends have pages of one size, a wire block is a page. Otherwise it is as many tokens as the
    smaller page holds, and, of the heads and layers, those that both ends hold.
    """

    @property
    def block_bytes(self) -> int:
        """Size of one wire block."""

    def in_place(self, blocks: Sequence[int]) -> list[memoryview]:
        """The bytes of these wire blocks where they are, in order, adjacent ones merged. Empty if a wire
        block is not contiguous in the pool, or not in host memory: then they must be copied."""

    def on_device(self, blocks: Sequence[int]) -> list[DeviceView]:
        """Likewise for a pool in device memory; empty if the pool is in host memory. For connectors whose
        library reads and writes device memory by itself."""

    def gather(self, blocks: Sequence[int], into: memoryview) -> None:
        """Copy the bytes of these wire blocks, in order."""

    def scatter(self, blocks: Sequence[int], piece: memoryview) -> None:
        """Make these bytes the content of these wire blocks, and of nothing else in their pages."""


class KVMemory(Protocol):
    """One rank's KV pool, of which each data connection has a part."""

    def part(self, block_size: int, heads: range | None = None, layers: range | None = None) -> PageMemory:
        """Wire blocks of ``block_size`` tokens, which divides the pool's block size, and these of its KV
        heads and layers (None: all). Raises ValueError for what the pool cannot be divided into."""


class Link(Protocol):
    """One prefill-decode pair's data connection, over the memory it was made with. Its close is the fence."""

    def post_receive(self, tag: int, blocks: Sequence[int]) -> Awaitable[None]:
        """Accept the message ``tag`` into these wire blocks. Done when every byte is there.

        Raises TransferError (from the awaitable) if that will never be: cancelled, or the link is gone.
        """

    def cancel_receive(self, tag: int) -> bool:
        """Withdraw a receive that nothing has matched. False: it is matched (or over) and will complete."""

    def send(self, tag: int, blocks: Sequence[int]) -> Awaitable[None]:
        """Send these wire blocks as the message ``tag``. Done when they may be overwritten."""

    async def close(self) -> None:
        """The fence: when this returns, no byte moves into or out of our pages through this link."""


class Connector(Protocol):
    """One transport in one process."""

    @property
    def name(self) -> str: ...

    @property
    def drained_is_proof(self) -> bool:
        """Whether the peer's word that its copies are over proves that no byte of them is still to land."""

    async def listen(self, host: str, port: int) -> str:
        """Accept data connections; returns host:port to hand to peers."""

    def expect(self, token: bytes, memory: PageMemory, on_lost: Callable[[], None]) -> Link:
        """Decode's end of a link, before the peer has connected. ``token`` admits that peer, once.
        ``on_lost`` is called once if the link ends by itself."""

    async def connect(
        self, address: str, token: bytes, memory: PageMemory, on_lost: Callable[[], None]
    ) -> Link:
        """Prefill's end of a link. Raises OSError or TransferError when there is no peer to be had."""

    async def close(self) -> None: ...
