"""Noticing that a client has left, while something else is going on."""

from __future__ import annotations

import asyncio
from types import TracebackType

from starlette.types import Receive


class ClientGoneError(Exception):
    """A client that closed its connection before it was answered."""


async def gone(receive: Receive) -> None:
    """Return when the client has left. The request's body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


class ClientWatch:
    """Cancels what runs inside of it as soon as the client leaves, and raises ClientGoneError instead.

    The work stays in its own task (as with ``asyncio.timeout``), so generators may be iterated across several
    watches. The request's body must have been read before.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = False

    async def __aenter__(self) -> ClientWatch:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("ClientWatch must run in a task")
        self._task = task
        self._cancelling = task.cancelling()
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        watcher = self._watcher
        del self._watcher  # the task refers to this watch: a cycle for every request
        watcher.cancel()
        # The cancellation is this watch's only if no other was asked for meanwhile (by a server that shuts
        # down).
        if self._gone and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise ClientGoneError from None

    async def _watch(self) -> None:
        await gone(self._receive)
        self._gone = True
        self._task.cancel()
