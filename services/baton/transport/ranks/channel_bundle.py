"""Several data connections that the handoff sees as one link.

Every message goes through all parts that move something of its KV group, each with its own heads and layers
of the same blocks. A transfer is over when it is over in every part, so that no byte of it can move any more,
and whole if it is whole in every part. The bundle is lost with any of its parts: the others are closed then,
which ends their transfers.
"""

from __future__ import annotations

import asyncio
import struct
import zlib
from collections.abc import Awaitable, Callable, Iterable, Sequence

from baton.transport.base import TransferError
from baton.transport.ranks.endpoint import DataLink


class _Transfer:
    """A transfer through all parts, whose end is the end of the last part's."""

    def __init__(self, on_failed: Callable[[], None]) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.cancelled = False
        self.parts: Sequence[DataLink] = ()
        """The parts that it goes through."""
        self._on_failed = on_failed
        self._running = 0
        self._error: BaseException | None = None

    def follow(self, part: Awaitable[None]) -> None:
        future = asyncio.ensure_future(part)
        self._running += 1
        future.add_done_callback(self._part_over)

    def _part_over(self, part: asyncio.Future[None]) -> None:
        self._running -= 1
        error = TransferError("a part was cancelled") if part.cancelled() else part.exception()
        if error is not None:
            self._error = self._error or error
            if not self.cancelled:
                self._on_failed()
        if not self._running:
            self.settle(self._error)

    def settle(self, error: BaseException | None) -> None:
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


class ChannelBundle:
    """``DataLink`` over several data connections. ``on_lost`` is called once if a part ends by itself."""

    def __init__(self, on_lost: Callable[[], None]) -> None:
        self._on_lost = on_lost
        self._parts: tuple[DataLink, ...] = ()
        self._ended = False
        self._closing: asyncio.Task[None] | None = None
        self._receives: dict[int, _Transfer] = {}

    def hold(self, parts: Sequence[DataLink]) -> None:
        """Take the parts: once, and all of them, each made with ``part_lost``. Both sides hold the parts in
        one order, for the checksum's sake."""
        self._parts = tuple(parts)
        if self._ended:
            self._start_closing()

    @property
    def ended(self) -> bool:
        """Whether the bundle is lost or closed."""
        return self._ended

    def part_lost(self) -> None:
        """End the bundle: a part has ended by itself, or has failed a transfer that was not cancelled, which
        is the same."""
        if self._ended:
            return
        self._ended = True
        if self._parts:
            self._start_closing()
        self._on_lost()

    def size_of(self, blocks: Sequence[int]) -> int:
        return sum(part.size_of(blocks) for part in self._parts)

    def _parts_of(self, blocks: Sequence[int]) -> list[DataLink]:
        """The parts through which these blocks go. Both sides' are the same pairs of ranks."""
        return [part for part in self._parts if part.size_of(blocks)]

    async def checksum(self, blocks: Sequence[int]) -> int:
        """Return the CRC-32 of the parts' CRC-32s. When this is over, failed or not, all parts have read
        their pages."""
        parts = self._parts_of(blocks)
        sums = await asyncio.gather(*(part.checksum(blocks) for part in parts), return_exceptions=True)
        _raise_first(sums)
        return zlib.crc32(struct.pack(f"!{len(sums)}I", *sums))

    def in_place(self) -> Awaitable[None] | None:
        waiting = [done for part in self._parts if (done := part.in_place()) is not None]
        return asyncio.create_task(_all(waiting)) if waiting else None

    def post_receive(self, tag: int, blocks: Sequence[int]) -> asyncio.Future[None]:
        receive = self._through(blocks, lambda part: part.post_receive(tag, blocks))
        if not receive.done.done():
            self._receives[tag] = receive
            receive.done.add_done_callback(lambda _: self._receives.pop(tag, None))
        return receive.done

    def cancel_receive(self, tag: int) -> bool:
        """Withdraw a receive from every part; True only if every part has withdrawn it. A part that is
        matched will complete, as prefill has sent the message, and a part in another process may still be
        withdrawn: the receive then ends by itself, with TransferError if any part was withdrawn."""
        receive = self._receives.get(tag)
        if receive is None:
            return False
        receive.cancelled = True
        withdrawn = [part.cancel_receive(tag) for part in receive.parts]  # every part is asked
        if not all(withdrawn):
            return False
        receive.settle(TransferError("cancelled before anything arrived"))
        return True

    def send(self, tag: int, blocks: Sequence[int]) -> asyncio.Future[None]:
        return self._through(blocks, lambda part: part.send(tag, blocks)).done

    def _through(self, blocks: Sequence[int], start: Callable[[DataLink], Awaitable[None]]) -> _Transfer:
        transfer = _Transfer(self.part_lost)
        if self._ended:
            transfer.settle(TransferError("the link is closed"))
            return transfer
        transfer.parts = self._parts_of(blocks)
        for part in transfer.parts:
            transfer.follow(start(part))
        return transfer

    async def close(self) -> None:
        """Close every part. Raises, when all are closed, the error that a part's close raised."""
        self._ended = True
        await asyncio.shield(self._start_closing())

    def _start_closing(self) -> asyncio.Task[None]:
        if self._closing is None:
            self._closing = asyncio.create_task(_all([part.close() for part in self._parts]))
        return self._closing


async def _all(waiting: Sequence[Awaitable[None]]) -> None:
    """Wait for every awaitable, then raise the first error."""
    _raise_first(await asyncio.gather(*waiting, return_exceptions=True))


def _raise_first(outcomes: Iterable[object]) -> None:
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
