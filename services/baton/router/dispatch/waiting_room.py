"""The queue of requests that no worker can take yet."""

from __future__ import annotations

import asyncio
import itertools
import time
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

REFUSALS = 8
"""Requests in a row that find no worker before a round ends: the requests behind them wait for the same
workers, and each try costs a placement."""


class FullError(Exception):
    """The waiting room has as many requests as it may."""


@dataclass(order=True, slots=True)
class _Waiting:
    turn: tuple[float, ...]
    arrival: int
    take: Callable[[], bool] = field(compare=False)
    done: asyncio.Future[None] = field(compare=False)


class WaitingRoom:
    """A queue of at most ``size`` requests, in the order of their turns and then of their arrival.

    Event loop's thread only. A request is begun within the call that finds a place for it, so that no place
    is given twice.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._waiting: list[_Waiting] = []
        self._arrivals = itertools.count()

    def __len__(self) -> int:
        return len(self._waiting)

    async def wait(self, take: Callable[[], bool], until: float, turn: tuple[float, ...] = ()) -> None:
        """Return once ``take``, which begins the request, has returned True. ``take`` is called now, if no
        other request waits, and after each :meth:`changed`; what it raises is raised here.

        ``turn``: the least goes first; the turns of one room are of one length. Raises TimeoutError when
        ``until`` is past, by ``time.monotonic``, and FullError.
        """
        if not self._waiting and take():
            return
        if len(self._waiting) >= self._size:
            raise FullError
        done = asyncio.get_running_loop().create_future()
        waiting = _Waiting(turn, next(self._arrivals), take, done)
        insort(self._waiting, waiting)
        self.changed()
        try:
            async with asyncio.timeout(max(0.0, until - time.monotonic())):
                await done
        except TimeoutError:
            if done.cancelled():
                raise
            done.result()  # the request was taken at the very moment of the timeout
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)

    def changed(self) -> None:
        """Try the waiting requests in order, after a worker came or has room."""
        refusals = 0
        for waiting in list(self._waiting):
            if refusals == REFUSALS:
                return
            if waiting.done.done():  # the waiter gave up a moment ago
                continue
            if self._taken(waiting):
                self._waiting.remove(waiting)
            else:
                refusals += 1

    @staticmethod
    def _taken(waiting: _Waiting) -> bool:
        try:
            if not waiting.take():
                return False
        except Exception as error:  # noqa: BLE001 - raised by the waiter
            waiting.done.set_exception(error)
        else:
            waiting.done.set_result(None)
        return True
