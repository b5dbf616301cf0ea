"""The narrow interface of a connector: how KV blocks move, whatever the wire.

Transfers are two-sided. The receiver posts a receive into pages it owns and names it with a tag; the sender
sends to that tag. What was not posted is never written: the receiver alone decides what memory changes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol


class TransferError(Exception):
    """A send or receive is over without its bytes: the link broke, was closed, or the peer sent nonsense."""


class PageMemory(Protocol):
    """The KV pool as host bytes; a pool on a device stages through host memory (``source``, ``landed``)."""

    @property
    def page_bytes(self) -> int:
        """Size of one KV block in bytes."""

    def source(self, pages: Sequence[int]) -> list[memoryview]:
        """The bytes of these pages in order, adjacent ones merged, to be read until the send is over."""

    def target(self, pages: Sequence[int]) -> list[memoryview]:
        """Memory for these pages' bytes in order."""

    def landed(self, pages: Sequence[int], views: list[memoryview]) -> None:
        """``views``, from ``target``, are filled: make them the pages' content."""


class Link(Protocol):
    """One prefill-decode pair's data connection. Its close is the fence."""

    def post_receive(self, tag: int, pages: Sequence[int]) -> Awaitable[None]:
        """Accept the message ``tag`` into ``pages``. Done when every byte is there.

        Raises TransferError (from the awaitable) if that will never be: cancelled, or the link is gone.
        """

    def cancel_receive(self, tag: int) -> bool:
        """Withdraw a receive that nothing has matched. False: it is matched (or over) and will complete."""

    def send(self, tag: int, pages: Sequence[int]) -> Awaitable[None]:
        """Send ``pages`` as the message ``tag``. Done when the pages may be overwritten."""

    async def close(self) -> None:
        """The fence: when this returns, no byte moves into or out of our pages through this link."""


class Connector(Protocol):
    """One transport in one process, over one registered pool."""

    @property
    def name(self) -> str: ...

    @property
    def drained_is_proof(self) -> bool:
        """Whether the peer's word that its copies are over proves that no byte of them is still to land."""

    async def listen(self, host: str, port: int) -> str:
        """Accept data connections; returns host:port to hand to peers."""

    def expect(self, token: bytes, on_lost: Callable[[], None]) -> Link:
        """Decode's end of a link, before the peer has connected. ``token`` admits that peer, once."""

    async def connect(self, address: str, token: bytes, on_lost: Callable[[], None]) -> Link:
        """Prefill's end of a link. Raises OSError or TransferError when there is no peer to be had."""

    async def close(self) -> None: ...
