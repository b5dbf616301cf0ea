"""The side of a rank in a process of its own: its connectors over its own pool, as the worker orders.

It has an event loop of its own, on a thread of its own beside the rank's steps.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial

import torch
from torch import Tensor

from baton.connector import choice
from baton.connector.memory import PoolMemory, pinned
from baton.connector.ranks import frames
from baton.connector.ranks.end import DataLink, LocalEnd
from baton.connector.ranks.share import Share
from baton.connector.staging import Staging, heap
from baton.connector.transport import TransferError
from baton.options import ConfigError

log = logging.getLogger(__name__)


def start(sock: socket.socket, pool: Tensor, share: Share, on_crash: Callable[[], None]) -> threading.Thread:
    """Serve the worker at the other end of ``sock``, until that is closed, on a thread that is returned.

    ``pool``: this rank's, which is ``share`` of the model's KV. ``on_crash`` must end the process, at once:
    whatever happened, its transfers may go on, and the worker takes the end of ``sock`` for proof that they
    do not.
    """

    def run() -> None:
        try:
            if pool.device.type == "cuda":
                torch.cuda.set_device(pool.device)  # it is each thread's own
            asyncio.run(serve(sock, pool, share, on_crash))
        except Exception:
            log.exception("the links of this rank met an error; the rank cannot go on")
            on_crash()

    thread = threading.Thread(target=run, name="rank-links", daemon=True)
    thread.start()
    return thread


async def serve(sock: socket.socket, pool: Tensor, share: Share, on_crash: Callable[[], None]) -> None:
    """As ``start``, in the running event loop."""
    sock.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=sock)
    orders = frames.orders(reader)
    begin = await anext(orders, None)
    if begin is None:  # the worker has ended
        return
    if not isinstance(begin, frames.Begin):
        raise frames.FrameError(f"not the first thing to be said: {begin}")
    memory = PoolMemory(pool)
    staging = Staging(allocate=heap if memory.device is None else pinned)
    try:
        connectors = choice.available(
            begin.connector,
            device=memory.device,
            host=begin.host,
            on_crash=on_crash,
            staging=staging,
            tls=None if begin.tls is None else begin.tls.files(),
        )
    except (choice.ConnectorMissingError, ConfigError) as error:
        writer.write(frames.encoded(frames.Unable(str(error))))
        await writer.drain()
        return
    rank = LocalEnd(connectors, memory, share)
    server = _Server(rank, writer, on_crash)
    server.say(_hello(rank, pool))
    try:
        async for order in orders:
            server.take(order)
    finally:
        await server.close()
        writer.close()


def _hello(rank: LocalEnd, pool: Tensor) -> frames.Hello:
    heads, layers = rank.share.heads, rank.share.layers
    return frames.Hello(
        rank.connectors,
        rank.drained_is_proof,
        (heads.start, heads.stop),
        (layers.start, layers.stop),
        pool[0, 0, 0, :, 0].nbytes,
    )


class _Server:
    """Carries orders out. An error that none expects ends the process: pages could stay pinned for ever."""

    def __init__(self, rank: LocalEnd, writer: asyncio.StreamWriter, on_crash: Callable[[], None]) -> None:
        self._rank = rank
        self._writer = writer
        self._on_crash = on_crash
        self._links: dict[int, DataLink] = {}
        self._making: dict[int, asyncio.Task[None]] = {}
        self._moving: dict[int, set[asyncio.Future[None]]] = {}
        """Transfers that are not over, by link."""
        self._tasks: set[asyncio.Task[None]] = set()

    def say(self, said: frames.Said) -> None:
        if not self._writer.is_closing():
            self._writer.write(frames.encoded(said))

    def take(self, order: frames.Order) -> None:
        match order:
            case frames.Listen():
                self._spawn(self._answer(order.call, self._listen(order)))
            case frames.Expect():
                self._expect(order)
            case frames.Connect(call=call, link=link):
                self._making[link] = self._spawn(self._answer(call, self._connect(order)))
            case frames.PostReceive(call=call, link=link, tag=tag, blocks=blocks):
                self._move(call, link, lambda data: data.post_receive(tag, blocks))
                self.say(frames.InPlace(call))
            case frames.CancelReceive(link=link, tag=tag):
                if link in self._links:
                    self._links[link].cancel_receive(tag)
            case frames.Send(call=call, link=link, tag=tag, blocks=blocks):
                self._move(call, link, lambda data: data.send(tag, blocks))
            case frames.Checksum():
                self._spawn(self._answer(order.call, self._checksum(order)))
            case frames.Close(call=call):
                self._spawn(self._answer(call, self._close(order)))
            case _:
                raise frames.FrameError(f"not to be said now: {order}")

    async def _answer(self, call: int, work: Coroutine[None, None, frames.Said]) -> None:
        try:
            said = await work
        except (OSError, TransferError, ValueError) as error:  # TimeoutError is an OSError
            said = frames.Failed(call, str(error) or repr(error))
        except asyncio.CancelledError:
            self.say(frames.Failed(call, "given up"))
            raise
        self.say(said)

    async def _listen(self, order: frames.Listen) -> frames.Said:
        return frames.Listening(order.call, dict(await self._rank.listen(order.host, order.port)))

    def _expect(self, order: frames.Expect) -> None:
        lost = partial(self.say, frames.Lost(order.link))
        try:
            data = self._rank.expect(order.connector, order.token, order.cut.cut(), lost)
        except ValueError as error:
            self.say(frames.Failed(order.call, str(error)))
        else:
            self._links[order.link] = data
            self.say(frames.Done(order.call))
        self.say(frames.InPlace(order.call))

    async def _connect(self, order: frames.Connect) -> frames.Said:
        lost = partial(self.say, frames.Lost(order.link))
        self._links[order.link] = await self._rank.connect(
            order.connector, order.address, order.token, order.cut.cut(), lost
        )
        return frames.Done(order.call)

    def _move(self, call: int, link: int, start: Callable[[DataLink], Awaitable[None]]) -> None:
        data = self._links.get(link)
        if data is None:
            self.say(frames.Failed(call, "the link is closed"))
            return
        try:
            moving = asyncio.ensure_future(start(data))
        except TransferError as error:
            self.say(frames.Failed(call, str(error)))
            return
        self._moving.setdefault(link, set()).add(moving)
        moving.add_done_callback(partial(self._moved, call, link))

    def _moved(self, call: int, link: int, moving: asyncio.Future[None]) -> None:
        self._moving[link].discard(moving)
        error = moving.exception()
        if error is None:
            self.say(frames.Done(call))
        elif isinstance(error, TransferError):
            self.say(frames.Failed(call, str(error)))
        else:
            self._crash(error)

    async def _checksum(self, order: frames.Checksum) -> frames.Said:
        data = self._links.get(order.link)
        if data is None:
            raise TransferError("the link is closed")
        return frames.Checked(order.call, await data.checksum(order.blocks))

    async def _close(self, order: frames.Close) -> frames.Said:
        """Whoever hears that the link is closed has heard the end of its transfers before."""
        making = self._making.pop(order.link, None)
        if making is not None:
            making.cancel()
            await asyncio.wait((making,))
        data = self._links.get(order.link)
        if data is not None:
            await data.close()
            del self._links[order.link]
        await asyncio.gather(*self._moving.get(order.link, ()), return_exceptions=True)
        self._moving.pop(order.link, None)
        return frames.Done(order.call)

    async def close(self) -> None:
        """The worker is gone: nobody is left whom the links could serve."""
        for task in self._making.values():
            task.cancel()
        await asyncio.gather(*self._making.values(), return_exceptions=True)
        await asyncio.gather(*(link.close() for link in self._links.values()), return_exceptions=True)
        await self._rank.close()

    # --- what must not fail

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._crash(error)

    def _crash(self, error: BaseException) -> None:
        log.critical("the links of this rank met an error; the rank cannot go on", exc_info=error)
        self._on_crash()
