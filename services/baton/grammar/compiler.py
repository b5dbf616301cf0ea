"""Compiles grammars on threads of its own, once for each tenant that uses them: only the requests that need a
grammar wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated
from weakref import WeakValueDictionary

from baton.core.structured_output import StructuredOutput
from baton.grammar.cache import GrammarCache, GrammarKey
from baton.grammar.errors import GrammarBusyError, GrammarError
from baton.grammar.lanes import TrialLanes
from baton.grammar.limits import CACHE_BYTES, CACHE_GRAMMARS
from baton.grammar.proof import ProvingGround
from baton.grammar.source import check_source
from baton.grammar.table import Grammar, TokenTable, compiled
from baton.grammar.turns import PendingGrammar
from baton.grammar.vocabulary import GuidedVocabulary
from baton.process.exported import counter
from baton.text.errors import TokenizerError


class _Workshop:
    """The token table and the vocabulary, shared by all threads and made for the first grammar."""

    def __init__(self, load: Callable[[], TokenTable]) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._made: tuple[TokenTable, GuidedVocabulary] | None = None

    def made(self) -> tuple[TokenTable, GuidedVocabulary]:
        """Return both, made at the first call. Raises GrammarError where the model cannot be guided."""
        with self._lock:
            if self._made is None:
                try:
                    table = self._load()
                    self._made = table, table.build()
                except TokenizerError as error:
                    raise GrammarError(f"this model cannot be guided: {error}") from error
            return self._made


class _Bench:
    """The bench of one thread, with a process for trials of its own."""

    def __init__(
        self, workshop: _Workshop, tell: Callable[[PendingGrammar, Grammar | GrammarError, float], None]
    ) -> None:
        """``tell`` gets the outcome and the seconds that it took."""
        self._workshop = workshop
        self._tell = tell
        self._ground: ProvingGround | None = None
        self._told_cpu_s = 0.0

    def answer(self, pending: PendingGrammar) -> None:
        began = time.monotonic()
        outcome: Grammar | GrammarError
        try:
            outcome = self._compile(pending.key.output)
        except GrammarError as error:
            outcome = error
        except Exception as error:  # noqa: BLE001 - one bad grammar must not end the thread for all
            outcome = GrammarBusyError(f"it could not be compiled: {error!r}")
        self._tell(pending, outcome, time.monotonic() - began)

    def _compile(self, output: StructuredOutput) -> Grammar:
        table, vocabulary = self._workshop.made()
        if self._ground is None:
            self._ground = ProvingGround(table)
        return Grammar(compiled(vocabulary.tokenizer, self._ground.prove(output)), vocabulary)

    def recover(self) -> float:
        if self._ground is None:
            return 0.0
        with suppress(GrammarBusyError, OSError):  # then the next trial starts it, and reports the error
            self._ground.renew()
        before, self._told_cpu_s = self._told_cpu_s, self._ground.used_cpu_s
        return self._told_cpu_s - before

    def close(self) -> None:
        if self._ground is not None:
            self._ground.close()


@dataclass(frozen=True, slots=True)
class GrammarStats:
    """The counters of a grammar compiler since it was made."""

    compiled: Annotated[int, counter("baton_grammars_compiled", "Grammars compiled.")] = 0
    refused: Annotated[
        int, counter("baton_grammars_refused", "Grammars that are invalid or beyond the limits.")
    ] = 0
    compile_seconds: Annotated[
        float,
        counter("baton_grammar_compile_seconds", "Time for compiling, that of refused grammars included."),
    ] = 0.0
    """The time for compiling, trials and refused grammars included, in seconds."""
    cache_hits: Annotated[int, counter("baton_grammar_cache_hits", "Grammars found compiled.")] = 0
    cache_misses: Annotated[int, counter("baton_grammar_cache_misses", "Grammars not found.")] = 0

    def __add__(self, other: GrammarStats) -> GrammarStats:
        return GrammarStats(
            compiled=self.compiled + other.compiled,
            refused=self.refused + other.refused,
            compile_seconds=self.compile_seconds + other.compile_seconds,
            cache_hits=self.cache_hits + other.cache_hits,
            cache_misses=self.cache_misses + other.cache_misses,
        )


class GrammarCompiler:
    """Compiles grammars for one model. Safe to use from any thread.

    The token table, the processes for trials and their threads are made for the first grammars. Grammars are
    cached while they are among those that their tenant has used last, and so are refusals: both are the same
    every time. No tenant gets what another's request has made, so that time tells nothing of others.
    Dropped from the cache, they stay known for as long as somebody holds the future that :meth:`compile`
    returned.
    """

    def __init__(self, load: Callable[[], TokenTable], tenant_cpu_s: float | None = None) -> None:
        """``load`` is called once, on a thread of the compiler's. It may raise GrammarError or
        TokenizerError. ``tenant_cpu_s``: CPU seconds a minute that each tenant's trials may take; None: no
        limit."""
        workshop = _Workshop(load)
        self._lock = threading.Lock()
        self._known: WeakValueDictionary[GrammarKey, Future[Grammar]] = WeakValueDictionary()
        self._cache = GrammarCache(CACHE_GRAMMARS, CACHE_BYTES)
        self._lanes = TrialLanes(
            lambda: _Bench(workshop, self._tell),
            lambda pending, refusal: self._tell(pending, refusal, 0.0),
            tenant_cpu_s,
        )
        self._stats = GrammarStats()

    def stats(self) -> GrammarStats:
        with self._lock:
            return self._stats

    def compile(self, output: StructuredOutput, tenant: str = "") -> Future[Grammar]:
        """Return the future of the compiled grammar, or of a GrammarError. Returns at once; the future may be
        done already.

        A grammar that this tenant has not asked for waits for the turn of ``tenant``, whoever else has asked
        for the same. The error is a GrammarBusyError if too many grammars wait, and a GrammarLimitError if
        too many of this tenant do, or have taken too long.
        """
        key = GrammarKey(tenant, output)
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                if known.done():
                    self._cache.keep(key, known)
                self._stats = replace(self._stats, cache_hits=self._stats.cache_hits + 1)
                return known
            self._stats = replace(self._stats, cache_misses=self._stats.cache_misses + 1)
            future: Future[Grammar] = Future()
            future.set_running_or_notify_cancel()  # many may wait for it: nobody cancels it
            pending = PendingGrammar(key, future)
            try:
                check_source(output)
                self._lanes.enter(tenant, pending)
            except GrammarBusyError as error:
                future.set_exception(error)
                return future
            except GrammarError as error:  # not cached: the source may be of any size, and the check is cheap
                self._stats = replace(self._stats, refused=self._stats.refused + 1)
                future.set_exception(error)
                return future
            self._known[key] = future
        return future

    def close(self) -> None:
        """End the threads, when everything queued is done, and the processes."""
        self._lanes.close()

    # -- on the compiler's threads -----------------------------------------------------------------------

    def _tell(self, pending: PendingGrammar, outcome: Grammar | GrammarError, seconds: float) -> None:
        """Count the outcome before anybody learns of it, then set it."""
        refusal = outcome if isinstance(outcome, GrammarError) else None
        with self._lock:
            self._stats = replace(
                self._stats,
                compiled=self._stats.compiled + (refusal is None),
                compile_seconds=self._stats.compile_seconds + seconds,
                refused=self._stats.refused + (refusal is not None),
            )
            if isinstance(refusal, GrammarBusyError):
                self._known.pop(pending.key, None)
            else:
                self._cache.keep(pending.key, pending.future)
        if isinstance(outcome, Grammar):
            pending.future.set_result(outcome)
        else:
            pending.future.set_exception(outcome)
