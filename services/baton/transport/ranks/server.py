"""The side of a rank in a process of its own: its connectors over its own pool, as the worker orders.

The server has an event loop of its own, on a thread of its own beside the rank's steps.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial

from baton.process.options import ConfigError
from baton.transport import registry
from baton.transport.base import ConnectorMissingError, TransferError
from baton.transport.pool_memory import PoolMemory
from baton.transport.ranks import frames
from baton.transport.ranks.endpoint import DataLink, LocalEndpoint
from baton.transport.ranks.shard import KVShard
from baton_kernels.kv_layout import StateKV

log = logging.getLogger(__name__)


def start(
    sock: socket.socket, memory: PoolMemory, share: KVShard, on_crash: Callable[[], None]
) -> threading.Thread:
    """Serve the worker at the other end of ``sock``, until that end is closed, on a thread that is returned.

    ``memory``: this rank's pool, which holds ``share`` of the model's KV. ``on_crash`` must end the process,
    at once: its transfers may still run after an unexpected error, and the worker takes the end of ``sock``
    for proof that they do not.
    """

    def run() -> None:
        try:
            memory.enter()
            asyncio.run(serve(sock, memory, share, on_crash))
        except Exception:
            log.exception("the links of this rank met an error; the rank cannot go on")
            on_crash()

    thread = threading.Thread(target=run, name="rank-links", daemon=True)
    thread.start()
    return thread


async def serve(
    sock: socket.socket, memory: PoolMemory, share: KVShard, on_crash: Callable[[], None]
) -> None:
    """Serve the worker as ``start`` does, in the running event loop."""
    sock.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=sock)
    orders = frames.orders(reader)
    begin = await anext(orders, None)
    if begin is None:  # the worker has ended
        return
    if not isinstance(begin, frames.Begin):
        raise frames.FrameError(f"not the first thing to be said: {begin}")
    try:
        tls = None if begin.tls is None else begin.tls.files()
        settings = memory.connector_settings(on_crash, begin.host, tls, require_rdma=begin.require_rdma)
        connectors = registry.available(begin.connector, settings)
    except (ConnectorMissingError, ConfigError) as error:
        writer.write(frames.encoded(frames.Unable(str(error))))
        await writer.drain()
        return
    rank = LocalEndpoint(connectors, memory, share)
    server = _Server(rank, writer, on_crash)
    server.say(_hello(rank, memory))
    try:
        async for order in orders:
            server.take(order)
    finally:
        await server.close()
        writer.close()


def _hello(rank: LocalEndpoint, memory: PoolMemory) -> frames.Hello:
    layout = memory.layout
    forms = tuple(
        frames.CellForm(len(group.tables), group.kv.size, 4, 0, True)
        if isinstance(group.kv, StateKV)
        else frames.CellForm(
            len(group.tables),
            group.kv.vectors * group.kv.dim,
            layout.element_bytes,
            group.kv.vectors * layout.scale_bytes,
            False,
        )
        for group in layout.groups
    )
    return frames.Hello(rank.connectors, rank.drained_is_proof, frames.wire_parts(rank.share), forms)


class _Server:
    """Carries orders out. An unexpected error ends the process: pages could stay pinned for ever."""

    def __init__(
        self, rank: LocalEndpoint, writer: asyncio.StreamWriter, on_crash: Callable[[], None]
    ) -> None:
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
            case frames.ExpectFrame():
                self._expect(order)
            case frames.ConnectFrame(call=call, link=link):
                self._making[link] = self._spawn(self._answer(call, self._connect(order)))
            case frames.PostReceiveFrame(call=call, link=link, tag=tag, blocks=blocks):
                self._move(call, link, lambda data: data.post_receive(tag, blocks))
                self.say(frames.InPlace(call))
            case frames.CancelReceiveFrame(link=link, tag=tag):
                if link in self._links:
                    self._links[link].cancel_receive(tag)
            case frames.SendFrame(call=call, link=link, tag=tag, blocks=blocks):
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
            said = frames.FailedFrame(call, str(error) or repr(error))
        except asyncio.CancelledError:
            self.say(frames.FailedFrame(call, "given up"))
            raise
        self.say(said)

    async def _listen(self, order: frames.Listen) -> frames.Said:
        return frames.Listening(order.call, dict(await self._rank.listen(order.host, order.port)))

    def _expect(self, order: frames.ExpectFrame) -> None:
        lost = partial(self.say, frames.Lost(order.link))
        try:
            data = self._rank.expect(order.connector, order.token, order.cut.cut(), lost)
        except ValueError as error:
            self.say(frames.FailedFrame(order.call, str(error)))
        else:
            self._links[order.link] = data
            self.say(frames.Done(order.call))
        self.say(frames.InPlace(order.call))

    async def _connect(self, order: frames.ConnectFrame) -> frames.Said:
        lost = partial(self.say, frames.Lost(order.link))
        self._links[order.link] = await self._rank.connect(
            order.connector, order.address, order.token, order.cut.cut(), lost
        )
        return frames.Done(order.call)

    def _move(self, call: int, link: int, start: Callable[[DataLink], Awaitable[None]]) -> None:
        data = self._links.get(link)
        if data is None:
            self.say(frames.FailedFrame(call, "the link is closed"))
            return
        try:
            moving = asyncio.ensure_future(start(data))
        except TransferError as error:
            self.say(frames.FailedFrame(call, str(error)))
            return
        self._moving.setdefault(link, set()).add(moving)
        moving.add_done_callback(partial(self._moved, call, link))

    def _moved(self, call: int, link: int, moving: asyncio.Future[None]) -> None:
        self._moving[link].discard(moving)
        error = moving.exception()
        if error is None:
            self.say(frames.Done(call))
        elif isinstance(error, TransferError):
            self.say(frames.FailedFrame(call, str(error)))
        else:
            self._crash(error)

    async def _checksum(self, order: frames.Checksum) -> frames.Said:
        data = self._links.get(order.link)
        if data is None:
            raise TransferError("the link is closed")
        return frames.Checked(order.call, await data.checksum(order.blocks))

    async def _close(self, order: frames.Close) -> frames.Said:
        """Close a link. The worker hears the end of the link's transfers before it hears that the link is
        closed."""
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
        """Close everything: the worker is gone, and the links have no other user."""
        for task in self._making.values():
            task.cancel()
        await asyncio.gather(*self._making.values(), return_exceptions=True)
        await asyncio.gather(*(link.close() for link in self._links.values()), return_exceptions=True)
        await self._rank.close()

    # --- tasks that must not fail

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
