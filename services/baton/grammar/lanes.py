"""The threads that try grammars out, each with a process for trials of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from baton.grammar.errors import GrammarError
from baton.grammar.limits import LANES, MAX_QUEUED, MAX_QUEUED_OF_TENANT, RESERVE_LANES
from baton.grammar.simple import is_simple
from baton.grammar.turns import PendingGrammar, TrialBudgets, TrialTurns


class Bench(Protocol):
    """Tries grammars out on one thread."""

    def answer(self, pending: PendingGrammar) -> None:
        """Try ``pending`` out and set its future. Raises nothing."""

    def recover(self) -> float:
        """Prepare for the next grammar. Returns the CPU seconds that the last one took, this recovery
        included."""

    def close(self) -> None:
        """End the process for trials."""


@dataclass(slots=True)
class _Line:
    """Grammars that wait for the same threads."""

    turns: TrialTurns
    max_lanes: int
    threads: list[threading.Thread] = field(default_factory=list)
    idle: int = 0


class TrialLanes:
    """Tries grammars out, fairly by tenant, and simple ones in a reserve. Safe to use from any thread.

    A thread is started for the first grammar, and a second one when another tenant's would have to wait.
    """

    def __init__(
        self,
        bench: Callable[[], Bench],
        refuse: Callable[[PendingGrammar, GrammarError], None],
        seconds_a_minute: float | None,
    ) -> None:
        """``seconds_a_minute``: CPU time that each tenant's trials may take; None: no limit. ``refuse`` is
        called on one of the threads."""
        self._bench = bench
        self._refuse = refuse
        self._budgets = TrialBudgets(seconds_a_minute)
        self._reserve, self._others = (
            _Line(TrialTurns(self._budgets, MAX_QUEUED, MAX_QUEUED_OF_TENANT), lanes)
            for lanes in (RESERVE_LANES, LANES)
        )
        self._changed = threading.Condition()
        self._closing = False

    def enter(self, tenant: str, pending: PendingGrammar) -> None:
        """Let ``pending`` wait for the turn of ``tenant``. Raises GrammarLimitError if that tenant has had
        its share, GrammarBusyError if too many grammars wait."""
        line = self._reserve if is_simple(pending.key.output) else self._others
        with self._changed:
            line.turns.offer(tenant, pending, time.monotonic())
            self._staff(line)
            self._changed.notify_all()

    def close(self) -> None:
        """End the threads, when everything that waits is done."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for line in (self._reserve, self._others):
            for thread in line.threads:
                thread.join()

    def _staff(self, line: _Line) -> None:
        """Start a thread if there is something for it to do."""
        if line.idle or len(line.threads) >= line.max_lanes or not line.turns.ready:
            return
        thread = threading.Thread(target=self._run, args=(line,), name="grammars", daemon=True)
        line.threads.append(thread)
        thread.start()

    # -- on the threads

    def _run(self, line: _Line) -> None:
        bench = self._bench()
        while (turn := self._next(line)) is not None:
            tenant, pending = turn
            bench.answer(pending)
            seconds = bench.recover()
            with self._changed:
                now = time.monotonic()
                refused = line.turns.end(tenant, seconds, now)
                reason = line.turns.spent(self._budgets.wait_s(tenant, now)) if refused else None
                self._changed.notify_all()
            for each in refused:
                assert reason is not None
                self._refuse(each, reason)
        bench.close()

    def _next(self, line: _Line) -> tuple[str, PendingGrammar] | None:
        """Wait for the next grammar and its tenant; None after the close."""
        with self._changed:
            line.idle += 1
            while (turn := line.turns.next()) is None and not (self._closing and not line.turns.waiting):
                self._changed.wait()
            line.idle -= 1
            self._staff(line)
        return turn
