"""The narrow interface of a connector: how KV blocks move, whatever the wire.

Transfers are two-sided. The receiver posts a receive into pages it owns and names it with a tag; the sender
sends to that tag. A message that no receive was posted for is never written: the receiver alone decides what
memory changes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from baton.net.certificates import TlsFiles
from baton.transport.staging import Staging, StagingRoom


class TransferError(Exception):
    """A send or receive that is over without its bytes: the link broke, was closed, or the peer broke the
    protocol."""


class ConnectorMissingError(Exception):
    """A connector that is not available here; the message says what to do."""


@dataclass(frozen=True, slots=True)
class DeviceView:
    """Adjacent bytes of a CUDA device's memory, in the form that libraries which take such memory want."""

    device: int
    """The device's index."""
    pointer: int
    nbytes: int
    owner: object = field(default=None, compare=False, repr=False)
    """The tensor that the bytes are of, if there is one: it keeps them allocated."""

    def __getitem__(self, part: slice, /) -> DeviceView:
        start, stop, step = part.indices(self.nbytes)
        if step != 1:
            raise ValueError(f"{part}: adjacent bytes are allowed")
        return DeviceView(self.device, self.pointer + start, max(0, stop - start), self.owner)

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """Version 3 of the interface, for bytes. It names no stream: a transfer starts only after the kernels
        that write its bytes are done."""
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.pointer, False), "version": 3}


@dataclass(frozen=True, slots=True)
class DeviceStaging:
    """A worker's room for pieces in its device's own memory, for connectors whose library reads and writes
    that; by direction, as ``Staging``."""

    sending: StagingRoom[DeviceView]
    receiving: StagingRoom[DeviceView]


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """The settings that a worker's connectors are made with."""

    staging: Staging
    on_crash: Callable[[], None]
    """A function called on the event loop when a connector's thread met an unexpected error: pages could stay
    pinned for ever, so it must end the worker."""
    host: str
    """The host that the connectors will listen on."""
    device: int | None = None
    """The CUDA device that the pool is on; None: it is in host memory."""
    device_staging: DeviceStaging | None = None
    """Room on that device."""
    enter_thread: Callable[[], None] = lambda: None
    """Makes the device the calling thread's own, with its context. A connector calls it first on each thread
    on which a library meets the device's memory."""
    require_rdma: bool = False
    """Whether only connectors may be offered that move blocks by RDMA here."""
    tls: TlsFiles | None = None
    """The files by which the services prove who they are, for connectors that encrypt."""


@dataclass(frozen=True, slots=True)
class GroupPart:
    """A part of one KV group: adjacent heads (of a state: units) of adjacent ones of the group's layers."""

    heads: range
    layers: range

    @property
    def size(self) -> int:
        """The number of heads, summed over the layers."""
        return len(self.heads) * len(self.layers)


@dataclass(frozen=True, slots=True)
class BlockForm:
    """The form of one group's wire blocks on one side of a link."""

    names: int
    """Names of a block, one for each page that it lies in; the peer's may be more or fewer."""
    nbytes: int
    """The bytes of a block that travel, equal on both sides."""

    def size_of(self, blocks: Sequence[int]) -> int:
        """The bytes of wire blocks with these names."""
        return len(blocks) // self.names * self.nbytes


class PageMemory(Protocol):
    """A link's view of a KV pool: *wire blocks* as bytes, named as in ``baton.transport.block_names``. All
    blocks of one message are of one group, and have one size.

    Where both ends have pages of one size, a wire block of a model with one group is a page. Otherwise it has
    as many tokens as the smaller page, and only the heads and layers that both ends hold. Its bytes have one
    order, whatever pages it lies in: [heads, layers, vectors, tokens, dim]; of a state [layers, units, size].
    """

    def form_of(self, blocks: Sequence[int]) -> BlockForm:
        """Return the form of these wire blocks, by their group. Raises ValueError for an unknown one."""

    def in_place(self, blocks: Sequence[int]) -> list[memoryview]:
        """Return the bytes of these wire blocks where they are, in order, adjacent ones merged. Empty if a
        wire block is not contiguous in the pool, or not in host memory: then the blocks must be copied."""

    def on_device(self, blocks: Sequence[int]) -> list[DeviceView]:
        """Return the bytes of these wire blocks in device memory, as ``in_place`` does; empty if the pool is
        in host memory. For connectors whose library reads and writes device memory by itself."""

    def whole(self) -> memoryview | DeviceView | None:
        """Return the memory that all of ``in_place``'s or ``on_device``'s bytes lie in, for connectors whose
        library must know of it before; None if these find no blocks."""

    def gather(self, blocks: Sequence[int], into: memoryview | DeviceView) -> None:
        """Copy the bytes of these wire blocks, in order. The copy is over on return."""

    def scatter(self, blocks: Sequence[int], piece: memoryview | DeviceView) -> None:
        """Make these bytes the content of these wire blocks, and of nothing else in their pages. They are
        there on return: whoever reads the pages then, on whatever stream of a device, reads these bytes."""


class KVMemory(Protocol):
    """One rank's KV pool, of which each data connection has a part."""

    def part(
        self, block_size: int, parts: Sequence[GroupPart] | None = None, arrives_as: str = ""
    ) -> PageMemory:
        """Return the pool as wire blocks of ``block_size`` tokens, which divides the pool's block size, with
        this part of each of its groups, counted from the pool's first head and layer (None: all).
        ``arrives_as``: the type of the K and V that arrive, which become the pool's; empty: the pool's.
        Raises ValueError for what the pool cannot be divided into, and for types that it cannot take."""


class Link(Protocol):
    """A prefill-decode pair's data connection, over the memory it was made with. Its close is the fence."""

    def post_receive(self, tag: int, blocks: Sequence[int]) -> Awaitable[None]:
        """Accept the message ``tag`` into these wire blocks. Done when every byte is there.

        Raises TransferError (from the awaitable) if that will never be: the receive was cancelled, or the
        link is gone.
        """

    def cancel_receive(self, tag: int) -> bool:
        """Withdraw a receive that no message has matched. False: it is matched (or over) and will
        complete."""

    def send(self, tag: int, blocks: Sequence[int]) -> Awaitable[None]:
        """Send these wire blocks as the message ``tag``. Done when they may be overwritten."""

    async def close(self) -> None:
        """The fence: when this returns, no byte moves into or out of our pages through this link."""


@runtime_checkable
class RdmaCapable(Protocol):
    """A connector that moves blocks by RDMA where there is what it takes."""

    @property
    def missing_for_rdma(self) -> str:
        """What is missing for it here; empty if nothing is."""


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
        """Make decode's end of a link, before the peer has connected. ``token`` admits that peer, once.
        ``on_lost`` is called once if the link ends by itself."""

    async def connect(
        self, address: str, token: bytes, memory: PageMemory, on_lost: Callable[[], None]
    ) -> Link:
        """Make prefill's end of a link. Raises OSError or TransferError when the peer cannot be reached."""

    async def close(self) -> None: ...
