"""Builds the automata of bad words: large ones beside the steps, in the turn of who asks for them."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from concurrent.futures import Future
from typing import NamedTuple
from weakref import ReferenceType, WeakValueDictionary, ref

from baton.engine.sampling.bad_words import BadWords

Runs = tuple[tuple[int, ...], ...]

AT_ONCE_TOKENS = 2048
"""The most tokens of all runs of an automaton that is built on the caller's thread: it takes some 4 ms."""
WORK_S = 0.0005
REST = 4.0
"""The thread rests four times as long as it worked, after each ``WORK_S`` seconds of work at the earliest:
the engine's steps need the interpreter's lock, which most of the work holds."""


class _Asked(NamedTuple):
    """An automaton that is to be built."""

    runs: Runs
    answer: ReferenceType[Future[BadWords]]
    """Dead when nobody waits for it any more."""


class BadWordsBuilder:
    """Builds automata, one for all answers to a request. Safe to use from any thread.

    A large one takes up to 0.1 s of work, on a thread that is there while there is something to do. Tenants
    take turns, an automaton each.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: WeakValueDictionary[tuple[str, Runs], Future[BadWords]] = WeakValueDictionary()
        self._waiting: OrderedDict[str, deque[_Asked]] = OrderedDict()
        """Builds that wait, by tenant, the next turn first."""
        self._busy = False

    def build(self, runs: Runs, tenant: str = "") -> Future[BadWords]:
        """Return the future of the automaton of ``runs``. All requests of ``tenant`` that have the same get
        the same one, for as long as somebody holds it."""
        key = tenant, runs
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                return known
            future = self._known[key] = Future[BadWords]()
            future.set_running_or_notify_cancel()  # several may wait for it: nobody cancels it
            if sum(map(len, runs)) > AT_ONCE_TOKENS:
                self._waiting.setdefault(tenant, deque()).append(_Asked(runs, ref(future)))
                if not self._busy:
                    self._busy = True
                    threading.Thread(target=self._run, name="bad-words", daemon=True).start()
                return future
        future.set_result(BadWords(runs))
        return future

    # -- on the thread

    def _run(self) -> None:
        while (asked := self._next()) is not None:
            future = asked.answer()
            if future is not None:
                _answer(future, asked.runs)

    def _next(self) -> _Asked | None:
        """The next automaton to build; None: there is none, and the thread ends."""
        with self._lock:
            if not self._waiting:
                self._busy = False
                return None
            tenant, queue = self._waiting.popitem(last=False)
            asked = queue.popleft()
            if queue:
                self._waiting[tenant] = queue
            return asked


def _answer(future: Future[BadWords], runs: Runs) -> None:
    try:
        built = BadWords(runs, _Rests().take)
    except Exception as error:  # noqa: BLE001 - one request's runs must not end the thread for all
        future.set_exception(error)
    else:
        future.set_result(built)


class _Rests:
    """The rests between pieces of work."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    def take(self) -> None:
        worked = time.monotonic() - self._since
        if worked >= WORK_S:
            time.sleep(REST * worked)
            self._since = time.monotonic()
