"""The admission policy: which request is let in next, and which is refused at once. Pure: no I/O, no clock.

Tenants share by start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996): each tenant has a tag, which
grows by the tokens it uses over its weight, and the tenant with the least tag goes next. A tenant that comes
back begins at the others' tags, so no tenant saves up. Tokens are estimated when a request comes and
corrected when it ends.

How much of the queue one tenant may fill follows from how much of it is free (dynamic thresholds, Choudhury
and Hahne, 1998): a tenant that floods the queue leaves room for tenants that come later.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from baton.router.admission.capacity import Capacity
from baton.router.admission.pace import ServiceRate
from baton.telemetry.admission import TenantView

MAX_SHARE_OF_FREE = 4.0
"""The ratio of what a tenant may fill to what is free: one tenant alone may fill 4/5 of the queue, and each
of n tenants 4 parts in 4n + 1."""

SURE = 0.7
"""The part of the longest allowed wait that an estimated wait may take: to be refused at once is better than
to wait in vain."""
CAUTION = 2.0
"""A factor on the time that an answer of usual length takes, as many answers take longer."""

MAX_SHARED = 4
"""The ratio of the tokens that may be open to the tokens that there are blocks for, where prompts share
blocks. Requests on their way to a worker are in no report of the worker's room."""

Blame = Literal["tenant", "overall"]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueBounds:
    """Bounds on all requests that wait."""

    requests: int
    prompt_tokens: int
    max_wait_s: float
    shared: bool = True
    """Whether each tenant has a share of the queue; otherwise any tenant may fill it."""
    most_seats: Callable[[int], int] | None = None
    """Returns how many of all seats the requests of one tenant may have at once; None: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedRequest:
    """A request that is to be let in."""

    tenant: str
    weight: float = 1.0
    answers: int = 1
    prompt_tokens: int
    max_outputs: int
    """The most tokens of all its answers together."""
    turn: float = 0.0
    """The order among the requests of its tenant: the least goes first."""
    deadline: float | None = None
    """The time at which the request ends, answered or not, on the monotonic clock."""


class RefusedError(Exception):
    """A request that must not wait. ``blame``: whether its tenant asks for more than its share, or all
    tenants together for too much."""

    def __init__(self, blame: Blame, reason: str, retry_after_s: float) -> None:
        super().__init__(reason)
        self.blame: Blame = blame
        self.reason = reason
        self.retry_after_s = retry_after_s


@dataclass(slots=True, eq=False)
class QueueEntry:
    """A request that waits or is open."""

    asked: QueuedRequest
    tokens: int
    """Estimated tokens of prompt and answers."""
    since: float
    begun: float | None = None


@dataclass(slots=True, eq=False)
class _Tenant:
    weight: float
    tag: float
    waiting: list[tuple[float, int, QueueEntry]] = field(default_factory=list)
    """A heap by turn. Requests that gave up stay in it until they come to its top."""
    count: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    open: int = 0


class FairQueue:
    """All requests of one router that wait or are open."""

    def __init__(self, bounds: QueueBounds) -> None:
        self.pace = ServiceRate()
        self._bounds = bounds
        self._tenants: dict[str, _Tenant] = {}
        self._gone: set[QueueEntry] = set()
        self._numbers = itertools.count()
        self._virtual = 0.0
        self.waiting = 0
        self.waiting_prompt_tokens = 0
        self.open_requests = 0
        self.open_answers = 0
        self.open_tokens = 0

    def tenants(self) -> list[TenantView]:
        """Return what each tenant has here that has anything."""
        return [
            TenantView(name, each.count, each.prompt_tokens, each.open)
            for name, each in self._tenants.items()
            if each.count or each.open
        ]

    # --- arrival

    def offer(self, asked: QueuedRequest, now: float) -> QueueEntry:
        """Queue a request; :meth:`admit` returns it when its turn comes. Raises RefusedError."""
        entry = self.check(asked, now)
        tenant = self._tenants.get(asked.tenant)
        if tenant is None:
            tenant = self._tenants[asked.tenant] = _Tenant(asked.weight, self._virtual)
        tenant.weight = asked.weight
        if not tenant.count:
            tenant.tag = max(tenant.tag, self._virtual)
        heapq.heappush(tenant.waiting, (asked.turn, next(self._numbers), entry))
        self._count(tenant, entry, +1)
        self.pace.waiting(True, now)
        return entry

    def check(self, asked: QueuedRequest, now: float) -> QueueEntry:
        """Return the entry that :meth:`offer` would queue. Raises RefusedError."""
        entry = QueueEntry(asked, self._estimate(asked), now)
        if self.waiting:  # otherwise its turn is now, or soon
            self._check_room(asked)
            self._check_wait(entry, now)
        return entry

    def _estimate(self, asked: QueuedRequest) -> int:
        outputs = min(asked.max_outputs, math.ceil(self.pace.outputs * asked.answers))
        return asked.prompt_tokens + outputs

    def _check_room(self, asked: QueuedRequest) -> None:
        requests, tokens = self._bounds.requests, self._bounds.prompt_tokens
        left = requests - self.waiting
        left_tokens = tokens - self.waiting_prompt_tokens
        if left < 1 or left_tokens < asked.prompt_tokens:
            raise RefusedError(
                "overall", "too many requests wait already", self._drained_s(self.waiting_tokens / 4)
            )
        tenant = self._tenants.get(asked.tenant)
        if tenant is None or not self._bounds.shared:
            return
        part = MAX_SHARE_OF_FREE * asked.weight / self._mean_weight(asked)
        over = tenant.count + 1 > part * left
        over_tokens = tenant.count and tenant.prompt_tokens + asked.prompt_tokens > part * left_tokens
        if over or over_tokens:
            reason = "as many requests of this tenant wait as its share of the queue has room for"
            raise RefusedError("tenant", reason, self._drained_s(tenant.tokens / 4))

    def _mean_weight(self, asked: QueuedRequest) -> float:
        weights = [t.weight for name, t in self._tenants.items() if t.count and name != asked.tenant]
        return (sum(weights) + asked.weight) / (len(weights) + 1)

    @property
    def waiting_tokens(self) -> int:
        return sum(tenant.tokens for tenant in self._tenants.values())

    def _drained_s(self, tokens: float) -> float:
        rate = self.pace.per_second(self.open_requests)
        return 1.0 if rate is None else tokens / rate

    # --- estimates

    def _check_wait(self, entry: QueueEntry, now: float) -> None:
        asked = entry.asked
        may_wait = self._bounds.max_wait_s
        if asked.deadline is not None:
            takes_s = CAUTION * self.pace.takes_s(asked.max_outputs / asked.answers)
            may_wait = min(may_wait, asked.deadline - now - takes_s)
        wait, longest = self.wait_s(entry), SURE * may_wait
        if wait is None or wait <= longest:
            return
        rest = wait - max(0.0, longest)
        if may_wait < 0:
            raise RefusedError("overall", "it could not be answered before its deadline", rest)
        tenant = self._tenants.get(asked.tenant)
        own = self._bounds.shared and tenant is not None and tenant.count
        blame: Blame = "tenant" if own and (self._behind_s(entry, 0) or 0.0) <= longest else "overall"
        reason = f"it would wait for {wait:.1f} s; no wait is begun that should take over {longest:.1f} s"
        raise RefusedError(blame, reason, rest)

    def wait_s(self, entry: QueueEntry) -> float | None:
        """Return how long a request that comes now would wait, in seconds; None while unknown."""
        tenant = self._tenants.get(entry.asked.tenant)
        if tenant is None:
            return self._behind_s(entry, 0)
        before = sum(
            each.tokens
            for turn, _, each in tenant.waiting
            if turn <= entry.asked.turn and each not in self._gone
        )
        return self._behind_s(entry, before)

    def _behind_s(self, entry: QueueEntry, own: int) -> float | None:
        """Return the wait behind ``own`` tokens of its own tenant, in seconds; other tenants get their shares
        meanwhile. None while unknown."""
        rate = self.pace.per_second(self.open_requests)
        if rate is None:
            return None
        asked = entry.asked
        reach = own + entry.tokens
        others = (
            min(tenant.tokens, reach * tenant.weight / asked.weight)
            for name, tenant in self._tenants.items()
            if name != asked.tenant
        )
        return (own + sum(others)) / rate

    # --- admission and end

    def admit(self, capacity: Capacity, now: float) -> list[QueueEntry]:
        """Return the requests whose turn it is now, which are open from here on."""
        admitted: list[QueueEntry] = []
        while True:
            tenant = self._next(capacity)
            if tenant is None or not self._fits(tenant.waiting[0][2], capacity):
                break
            entry = heapq.heappop(tenant.waiting)[2]
            self._count(tenant, entry, -1)
            self._virtual = max(self._virtual, tenant.tag)
            tenant.tag += entry.tokens / tenant.weight
            tenant.open += 1
            self.open_requests += 1
            self.open_answers += entry.asked.answers
            self.open_tokens += entry.tokens
            entry.begun = now
            admitted.append(entry)
        self.pace.waiting(bool(self.waiting), now)
        return admitted

    def _next(self, capacity: Capacity) -> _Tenant | None:
        for tenant in self._tenants.values():
            while tenant.waiting and tenant.waiting[0][2] in self._gone:
                self._gone.discard(heapq.heappop(tenant.waiting)[2])
        most = None if self._bounds.most_seats is None else self._bounds.most_seats(capacity.seats)
        waiting = (t for t in self._tenants.values() if t.count and (most is None or t.open < most))
        return min(waiting, key=lambda t: t.tag, default=None)

    def _fits(self, entry: QueueEntry, capacity: Capacity) -> bool:
        """Whether there is room for ``entry``. A request with more tokens than there is room for at all goes
        alone."""
        if not self.open_answers:
            return True
        # A request that wants more than half of the seats has its other answers wait on the workers: waiting
        # for all of its seats here would empty the ring, and keep every other request out meanwhile.
        if self.open_answers + min(entry.asked.answers, max(1, capacity.seats // 2)) > capacity.seats:
            return False
        if capacity.tokens is None or self.open_tokens + entry.tokens <= capacity.tokens:
            return True
        within = self.open_tokens + entry.tokens <= MAX_SHARED * capacity.tokens
        return within and 2 * entry.tokens <= capacity.spare

    def give_up(self, entry: QueueEntry, now: float) -> None:
        """Withdraw a request that was not let in and whose client waits no more."""
        tenant = self._tenants[entry.asked.tenant]
        self._gone.add(entry)
        self._count(tenant, entry, -1)
        if len(self._gone) > 64 and len(self._gone) > self.waiting:
            for each in self._tenants.values():
                each.waiting = [item for item in each.waiting if item[2] not in self._gone]
                heapq.heapify(each.waiting)
            self._gone.clear()
        self._forget(entry.asked.tenant)
        self.pace.waiting(bool(self.waiting), now)

    def end(self, entry: QueueEntry, outputs: int, completed: bool, now: float, *, ran: bool = True) -> None:
        """End an open request, whose answers have ``outputs`` tokens. Its tenant is charged what it used, not
        the estimate; a request that was not ``completed`` does not count towards the averages."""
        tenant = self._tenants[entry.asked.tenant]
        assert entry.begun is not None
        used = entry.asked.prompt_tokens + outputs if ran else 0
        tenant.tag += (used - entry.tokens) / tenant.weight
        tenant.open -= 1
        self.open_requests -= 1
        self.open_answers -= entry.asked.answers
        self.open_tokens -= entry.tokens
        if completed:
            self.pace.ended(used, outputs, entry.asked.answers, now - entry.begun, now)
        self._forget(entry.asked.tenant)

    def _forget(self, name: str) -> None:
        """Forget a tenant that has no requests here and is not ahead of the others. When no tenant has any,
        all begin anew."""
        if not (self.waiting or self.open_requests):
            self._tenants.clear()
            self._gone.clear()
            return
        tenant = self._tenants[name]
        if not (tenant.count or tenant.open or tenant.waiting) and tenant.tag <= self._virtual:
            del self._tenants[name]

    def _count(self, tenant: _Tenant, entry: QueueEntry, sign: int) -> None:
        tenant.count += sign
        tenant.tokens += sign * entry.tokens
        tenant.prompt_tokens += sign * entry.asked.prompt_tokens
        self.waiting += sign
        self.waiting_prompt_tokens += sign * entry.asked.prompt_tokens
