"""The account of what one process has admitted: the same sums as in Redis, in memory. Pure: the time is an
argument."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from baton.router.shared.limits import (
    BUCKET_MS,
    DAY_MS,
    MEASURES,
    WINDOW_BUCKETS,
    LimitDecision,
    Limits,
    Measure,
    RemainingLimit,
    bucket_of,
    day_of,
    oldest_bucket,
    until_left_ms,
)


class Window:
    """A sliding window of a minute, in buckets."""

    def __init__(self) -> None:
        self.buckets: dict[int, int] = {}

    def add(self, bucket: int, amount: int) -> None:
        """Add ``amount`` to ``bucket``. It may be negative: an amount reserved and not used."""
        if bucket not in self.buckets:  # total() is never called for a measure without a limit
            self._forget(oldest_bucket(bucket * BUCKET_MS))
        self.buckets[bucket] = max(0, self.buckets.get(bucket, 0) + amount)

    def total(self, now_ms: int) -> int:
        self._forget(oldest_bucket(now_ms))
        return sum(self.buckets.values())

    def _forget(self, oldest: int) -> None:
        """Drop the buckets before ``oldest``."""
        for bucket in [bucket for bucket in self.buckets if bucket < oldest]:
            del self.buckets[bucket]

    def wait_ms(self, amount: int, limit: float, now_ms: int, debt: Debt | None = None) -> int:
        """Return the time until ``amount`` fits beside ``debt``, in milliseconds; 0: it fits; -1: it never
        will."""
        owed = {} if debt is None else debt.due(now_ms)
        excess = self.total(now_ms) + sum(owed.values()) + amount - limit
        if excess <= 0:
            return 0
        for bucket, used in sorted([*self.buckets.items(), *owed.items()]):
            excess -= used
            if excess <= 0:
                return max(1, until_left_ms(bucket, now_ms))
        return -1

    def reset_ms(self, now_ms: int) -> int:
        used = [bucket for bucket, amount in self.buckets.items() if amount]
        return until_left_ms(max(used), now_ms) if used else 0


class Debt:
    """The tokens that requests took beyond this process's share of a limit. The following minutes pay for
    them: up to one share of the debt counts in each, so that on average no more than the share is taken."""

    def __init__(self) -> None:
        self._parts: dict[str, list[tuple[int, int]]] = {}
        """Lease → buckets, each a window after the last, and the lease's tokens that count in each. Parts are
        few: a request takes at most the limit, and so at most as many parts as there are replicas."""

    def take(self, lease: str, bucket: int, tokens: int, share: int) -> None:
        """Add the debt of a request that takes ``tokens``, of which ``share`` counts in ``bucket``."""
        parts = []
        for number, begin in enumerate(range(share, tokens, share), start=1):
            parts.append((bucket + number * (WINDOW_BUCKETS + 1), min(share, tokens - begin)))
        if parts:
            self._parts[lease] = parts

    def give_back(self, lease: str, tokens: int) -> None:
        """Reduce the debt of a request that used ``tokens`` less, from its last bucket backwards."""
        parts = self._parts.get(lease, [])
        while parts and tokens > 0:
            bucket, amount = parts.pop()
            if amount > tokens:
                parts.append((bucket, amount - tokens))
            tokens -= amount

    def due(self, now_ms: int) -> dict[int, int]:
        """Return, for each bucket, the debt to be paid in the window after it, now or later."""
        oldest = oldest_bucket(now_ms)
        due: dict[int, int] = {}
        for lease in list(self._parts):
            left = [(bucket, amount) for bucket, amount in self._parts[lease] if bucket >= oldest]
            if not left:
                del self._parts[lease]
                continue
            self._parts[lease] = left
            for bucket, amount in left:
                due[bucket] = due.get(bucket, 0) + amount
        return due


@dataclass(frozen=True, slots=True)
class _Elsewhere:
    """What other replicas had used of a minute at Redis's last answer."""

    requests: int
    tokens: int
    until_ms: int
    """The time at which all of it has left the window."""


@dataclass(slots=True)
class Account:
    """One tenant's use of its limits in this process."""

    requests: Window = field(default_factory=Window)
    tokens: Window = field(default_factory=Window)
    running: set[str] = field(default_factory=set)
    """Leases of requests under way."""
    debt: Debt = field(default_factory=Debt)
    """The debt of tokens per minute, taken while this process decides alone."""
    elsewhere: _Elsewhere | None = None
    """The use by other replicas. None: none is known."""
    day: int = 0
    day_tokens: int = 0

    def count(self, lease: str, bucket: int, tokens: int, now_ms: int) -> None:
        """Count an admitted request."""
        self.requests.add(bucket, 1)
        self.tokens.add(bucket, tokens)
        self.running.add(lease)
        self._turn_day(now_ms)
        self.day_tokens += tokens

    def settle(self, lease: str, bucket: int, difference: int, now_ms: int) -> None:
        """End a request that used ``difference`` tokens more than it had reserved."""
        self.running.discard(lease)
        self.tokens.add(bucket, difference)
        self.debt.give_back(lease, -difference)
        self._turn_day(now_ms)
        if self.day == day_of(bucket):
            self.day_tokens = max(0, self.day_tokens + difference)

    def note_elsewhere(self, told: LimitDecision, now_ms: int) -> None:
        """Derive the use by other replicas from ``told``, Redis's count of all replicas. This process's own
        part is counted here already."""
        requests = _used_beside(told.requests, self.requests, now_ms)
        tokens = _used_beside(told.tokens, self.tokens, now_ms)
        until_ms = now_ms + until_left_ms(bucket_of(now_ms), now_ms)
        self.elsewhere = _Elsewhere(requests, tokens, until_ms) if requests or tokens else None

    def decide(self, limits: Limits, tokens: int, replicas: int, now_ms: int) -> LimitDecision:
        """Decide whether one more request fits into this process's share: a limit divided by ``replicas``."""
        self._turn_day(now_ms)
        share = [None if limit is None else _share(limit, replicas) for limit in limits.in_order()]
        per_minute, tokens_per_minute, concurrent, _ = share
        waits = (
            self._requests_wait_ms(limits.requests_per_minute, replicas, now_ms),
            self._tokens_wait_ms(tokens, limits.tokens_per_minute, replicas, now_ms),
            1000 if concurrent is not None and len(self.running) >= concurrent else 0,
            self._quota_wait_ms(tokens, limits.tokens_per_day, replicas, now_ms),
        )
        wait = -1 if -1 in waits else max(waits)
        against = (m for m, each in zip(MEASURES, waits, strict=True) if (each < 0 if wait < 0 else each))
        refused: Measure | None = next(against, None)
        took = refused is None
        return LimitDecision(
            refused,
            wait,
            _room(self.requests, limits.requests_per_minute, per_minute, int(took), now_ms),
            _room(
                self.tokens,
                limits.tokens_per_minute,
                tokens_per_minute,
                tokens * took,
                now_ms,
                self.debt.due(now_ms),
            ),
        )

    def _requests_wait_ms(self, limit: int | None, replicas: int, now_ms: int) -> int:
        if limit is None:
            return 0
        others = 0 if self.elsewhere is None else self.elsewhere.requests
        wait = self.requests.wait_ms(1, _share(limit, replicas), now_ms)
        return max(wait, self._beside_ms(self.requests, 1, limit - others, now_ms))

    def _tokens_wait_ms(self, tokens: int, limit: int | None, replicas: int, now_ms: int) -> int:
        if limit is None:
            return 0
        others = 0 if self.elsewhere is None else self.elsewhere.tokens
        share = _share(limit, replicas)
        wait = self.tokens.wait_ms(_tested(tokens, limit, replicas), share, now_ms, self.debt)
        return wait if wait < 0 else max(wait, self._beside_ms(self.tokens, tokens, limit - others, now_ms))

    def _beside_ms(self, window: Window, amount: int, left: int, now_ms: int) -> int:
        """Return the time until ``amount`` fits into ``left``, the limit less the use by others, in
        milliseconds."""
        if self.elsewhere is None or now_ms >= self.elsewhere.until_ms:
            return 0
        forgotten_ms = self.elsewhere.until_ms - now_ms
        wait = window.wait_ms(amount, left, now_ms)
        return forgotten_ms if wait < 0 else min(wait, forgotten_ms)

    def borrow(self, lease: str, bucket: int, tokens: int, limits: Limits, replicas: int) -> None:
        """Add the debt of a request that this process admitted alone: ``tokens`` may be more than the
        share."""
        if limits.tokens_per_minute is not None:
            self.debt.take(lease, bucket, tokens, int(_share(limits.tokens_per_minute, replicas)))

    def _quota_wait_ms(self, tokens: int, limit: int | None, replicas: int, now_ms: int) -> int:
        if limit is None:
            return 0
        if tokens > limit:
            return -1
        over = self.day_tokens + _tested(tokens, limit, replicas) > _share(limit, replicas)
        return DAY_MS - now_ms % DAY_MS if over else 0

    def _turn_day(self, now_ms: int) -> None:
        if self.day != now_ms // DAY_MS:
            self.day, self.day_tokens = now_ms // DAY_MS, 0


def _share(limit: int, replicas: int) -> float:
    return max(1.0, limit / replicas)


def _tested(tokens: int, limit: int, replicas: int) -> int:
    """Return the tokens for which there must be room. A request within the limit, but beyond this process's
    share, is admitted when nothing else counts here: otherwise it never would be."""
    return tokens if tokens > limit else min(tokens, int(_share(limit, replicas)))


def _used_beside(room: RemainingLimit | None, window: Window, now_ms: int) -> int:
    """Return what is used of a limit and is not in ``window``."""
    return 0 if room is None else max(0, room.limit - room.remaining - window.total(now_ms))


def _room(
    window: Window,
    limit: int | None,
    share: float | None,
    taken: int,
    now_ms: int,
    owed: Mapping[int, int] = MappingProxyType({}),
) -> RemainingLimit | None:
    if limit is None or share is None:
        return None
    left = max(0, int(share - window.total(now_ms) - sum(owed.values()) - taken))
    reset = until_left_ms(bucket_of(now_ms), now_ms) if taken else window.reset_ms(now_ms)
    return RemainingLimit(limit, left, max([reset, *(until_left_ms(bucket, now_ms) for bucket in owed)]))
