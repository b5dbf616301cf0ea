"""Compiled grammars, kept: one thread of its own compiles, and nobody waits for it but who asks."""

from __future__ import annotations

import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

from llguidance import LLMatcher, LLTokenizer

from baton.grammar.errors import GrammarBusyError, GrammarError
from baton.grammar.limits import CACHE_BYTES, CACHE_GRAMMARS, MAX_QUEUED
from baton.grammar.proof import ProvingGround
from baton.grammar.source import check_source
from baton.grammar.table import TokenTable, compiled
from baton.structured_output import StructuredOutput
from baton.telemetry.grammar import GrammarStats
from baton.text.errors import TokenizerError


class Grammar:
    """A compiled grammar."""

    def __init__(self, start: LLMatcher, tokens: LLTokenizer) -> None:
        self._start = start
        self.vocab_size = tokens.vocab_size

    def matcher(self) -> LLMatcher:
        """A matcher at the grammar's start, independent of all others."""
        return self._start.deep_copy()


@dataclass(frozen=True, slots=True)
class _Compiling:
    ground: ProvingGround
    tokens: LLTokenizer


class GrammarCompiler:
    """Compiles grammars for one model. Safe to use from any thread.

    The token table, the process for trials and the thread are made for the first grammar. Grammars are kept
    while they are among the most recently used, refusals likewise: both are the same every time. Beyond that
    they are known for as long as somebody has what :meth:`compile` gave for them.
    """

    def __init__(self, load: Callable[[], TokenTable]) -> None:
        """``load`` is called once, on the compiler's thread. It may raise GrammarError or TokenizerError."""
        self._load = load
        self._lock = threading.Lock()
        self._queue: queue.Queue[tuple[StructuredOutput, Future[Grammar]] | None] = queue.Queue(MAX_QUEUED)
        self._thread: threading.Thread | None = None
        self._known: WeakValueDictionary[StructuredOutput, Future[Grammar]] = WeakValueDictionary()
        self._cache: OrderedDict[StructuredOutput, Future[Grammar]] = OrderedDict()
        """Those of the known that are kept."""
        self._cached_bytes = 0
        self._compiling: _Compiling | None = None
        self._stats = GrammarStats()

    def stats(self) -> GrammarStats:
        with self._lock:
            return self._stats

    def compile(self, output: StructuredOutput) -> Future[Grammar]:
        """The compiled grammar, or GrammarError. Returns at once; the future may be done already."""
        with self._lock:
            known = self._known.get(output)
            if known is not None:
                self._keep(output, known)
                self._stats = replace(self._stats, cache_hits=self._stats.cache_hits + 1)
                return known
            self._stats = replace(self._stats, cache_misses=self._stats.cache_misses + 1)
            future: Future[Grammar] = Future()
            future.set_running_or_notify_cancel()  # many may wait for it: nobody cancels it
            try:
                check_source(output)
                self._queue.put_nowait((output, future))
            except GrammarError as error:  # not kept: the source may be of any size, and the check is cheap
                self._stats = replace(self._stats, refused=self._stats.refused + 1)
                future.set_exception(error)
                return future
            except queue.Full:
                future.set_exception(GrammarBusyError("too many grammars wait to be compiled"))
                return future
            self._known[output] = future
            self._keep(output, future)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
                self._thread.start()
        return future

    def close(self) -> None:
        """End the thread, when what is queued is done, and the process."""
        thread = self._thread
        if thread is not None:
            self._queue.put(None)
            thread.join()

    # -- the compiler's thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            self._answer(*item)
        if self._compiling is not None:
            self._compiling.ground.close()

    def _answer(self, output: StructuredOutput, future: Future[Grammar]) -> None:
        """Compiles, and counts before anybody hears of it."""
        began = time.monotonic()
        grammar: Grammar | None = None
        refusal: GrammarError | None = None
        try:
            grammar = self._compile(output)
        except GrammarError as error:
            refusal = error
        except Exception as error:  # noqa: BLE001 - one bad grammar must not end the thread for all
            refusal = GrammarBusyError(f"it could not be compiled: {error!r}")
        with self._lock:
            self._stats = replace(
                self._stats,
                compiled=self._stats.compiled + (refusal is None),
                compile_seconds=self._stats.compile_seconds + time.monotonic() - began,
                refused=self._stats.refused + (refusal is not None),
            )
            if isinstance(refusal, GrammarBusyError):
                self._known.pop(output, None)
                self._forget(output)
        if grammar is not None:
            future.set_result(grammar)
        else:
            future.set_exception(refusal)
        if self._compiling is not None:
            self._compiling.ground.renew()

    def _compile(self, output: StructuredOutput) -> Grammar:
        if self._compiling is None:
            self._compiling = self._prepare()
        proven = self._compiling.ground.prove(output)
        return Grammar(compiled(self._compiling.tokens, proven), self._compiling.tokens)

    def _prepare(self) -> _Compiling:
        try:
            table = self._load()
            return _Compiling(ProvingGround(table), table.build())
        except TokenizerError as error:
            raise GrammarError(f"this model cannot be guided: {error}") from error

    # -- the cache, under the lock -----------------------------------------------------------------------

    def _keep(self, output: StructuredOutput, future: Future[Grammar]) -> None:
        self._forget(output)
        self._cache[output] = future
        self._cached_bytes += _size(output)
        while len(self._cache) > CACHE_GRAMMARS or self._cached_bytes > CACHE_BYTES:
            self._forget(next(iter(self._cache)))

    def _forget(self, output: StructuredOutput) -> None:
        if self._cache.pop(output, None) is not None:
            self._cached_bytes -= _size(output)


def _size(output: StructuredOutput) -> int:
    return len(output.text) + len(output.around)
