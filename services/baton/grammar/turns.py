"""The order in which grammars are tried out, fair to tenants. Pure: no I/O, no clock.

Tenants share by start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996): each has a tag, which grows by
the seconds that its trials take, and the least tag goes next. A tenant has one trial at a time, so the time
of its last trial is known before its next turn, and nothing is estimated.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from baton.grammar.cache import GrammarKey
from baton.grammar.errors import GrammarBusyError, GrammarLimitError
from baton.grammar.table import Grammar

MINUTE_S = 60.0
SOON_S = 1.0
"""The time after which a tenant whose part of the queue is full is told to come back, in seconds."""


@dataclass(slots=True, eq=False)
class PendingGrammar:
    """A grammar that has not been tried out yet."""

    key: GrammarKey
    future: Future[Grammar]


class TrialBudgets:
    """The seconds that each tenant's trials may still take: a token bucket, which holds a minute's share.

    A trial may take more than is left, since its time is not known before: then the tenant waits until the
    bucket has made up for that.
    """

    def __init__(self, seconds_a_minute: float | None) -> None:
        """``seconds_a_minute``: seconds of trials in a minute; None: no limit."""
        self.seconds_a_minute = seconds_a_minute
        self._spent: dict[str, tuple[float, float]] = {}
        """Tenant → seconds that are missing in its bucket, and the time at which they were."""

    def wait_s(self, tenant: str, now: float) -> float:
        """Return the seconds until something is left in the tenant's bucket; 0: something is."""
        if self.seconds_a_minute is None:
            return 0.0
        over = self._missing(tenant, now) - self.seconds_a_minute
        return 0.0 if over < 0 else (over + 0.01 * self.seconds_a_minute) * MINUTE_S / self.seconds_a_minute

    def spend(self, tenant: str, seconds: float, now: float) -> None:
        if self.seconds_a_minute is None:
            return
        for each in [each for each in self._spent if not self._missing(each, now)]:
            del self._spent[each]
        self._spent[tenant] = (self._missing(tenant, now) + seconds, now)

    def _missing(self, tenant: str, now: float) -> float:
        if self.seconds_a_minute is None or tenant not in self._spent:
            return 0.0
        missing, at = self._spent[tenant]
        return max(0.0, missing - (now - at) * self.seconds_a_minute / MINUTE_S)


@dataclass(slots=True)
class _Queue:
    """One tenant's grammars that wait."""

    tag: float
    waiting: deque[PendingGrammar] = field(default_factory=deque)
    busy: bool = False
    """Whether one of the tenant's grammars is being tried out."""


class TrialTurns:
    """The grammars of all tenants that wait for the same processes."""

    def __init__(self, budgets: TrialBudgets, most: int, max_of_tenant: int) -> None:
        """``most`` grammars may wait, ``max_of_tenant`` of each tenant."""
        self._budgets = budgets
        self._most = most
        self._max_of_tenant = max_of_tenant
        self._queues: dict[str, _Queue] = {}
        self._virtual = 0.0
        self.waiting = 0

    def offer(self, tenant: str, pending: PendingGrammar, now: float) -> None:
        """Let ``pending`` wait for the turn of ``tenant``. Raises GrammarLimitError if that tenant has had
        its share, GrammarBusyError if too many grammars wait."""
        wait_s = self._budgets.wait_s(tenant, now)
        if wait_s:
            raise self.spent(wait_s)
        queue = self._queues.get(tenant)
        if queue is not None and len(queue.waiting) >= self._max_of_tenant:
            most = self._max_of_tenant
            raise GrammarLimitError(f"{most} new grammars of this tenant wait already", SOON_S)
        if self.waiting >= self._most:
            raise GrammarBusyError("too many grammars wait to be compiled")
        if queue is None:
            queue = self._queues[tenant] = _Queue(self._virtual)
        if not (queue.waiting or queue.busy):
            queue.tag = max(queue.tag, self._virtual)
        queue.waiting.append(pending)
        self.waiting += 1

    def spent(self, wait_s: float) -> GrammarLimitError:
        """Return the error for a tenant whose budget is used up."""
        seconds = self._budgets.seconds_a_minute
        reason = f"new grammars of this tenant have taken the {seconds:g} s a minute that trying them out may"
        return GrammarLimitError(reason, wait_s)

    @property
    def ready(self) -> bool:
        """Whether there is a grammar to be tried out now."""
        return self._first() is not None

    def next(self) -> tuple[str, PendingGrammar] | None:
        """Return the tenant whose turn it is, and its grammar. The tenant is busy until :meth:`end`."""
        tenant = self._first()
        if tenant is None:
            return None
        queue = self._queues[tenant]
        pending = queue.waiting.popleft()
        self.waiting -= 1
        queue.busy = True
        self._virtual = max(self._virtual, queue.tag)
        return tenant, pending

    def _first(self) -> str | None:
        able = (t for t, queue in self._queues.items() if queue.waiting and not queue.busy)
        return min(able, key=lambda tenant: self._queues[tenant].tag, default=None)

    def end(self, tenant: str, seconds: float, now: float) -> list[PendingGrammar]:
        """End the trial of ``tenant``. Return its grammars that are refused, as it has used up its
        budget."""
        queue = self._queues[tenant]
        queue.busy = False
        queue.tag += seconds
        self._budgets.spend(tenant, seconds, now)
        refused: list[PendingGrammar] = []
        if self._budgets.wait_s(tenant, now):
            while queue.waiting:
                refused.append(queue.waiting.popleft())
            self.waiting -= len(refused)
        self._forget()
        return refused

    def _forget(self) -> None:
        """Forget tenants that have nothing here and are not ahead of the others. When no tenant has anything,
        all start anew."""
        idle = [t for t, queue in self._queues.items() if not (queue.waiting or queue.busy)]
        if len(idle) == len(self._queues):
            self._queues.clear()
        for tenant in idle:
            if tenant in self._queues and self._queues[tenant].tag <= self._virtual:
                del self._queues[tenant]
