"""What one process has admitted: the same sums as in Redis, in memory. Pure: the time is given."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.router.shared.limits import (
    BUCKET_MS,
    DAY_MS,
    MEASURES,
    Decision,
    Limits,
    Measure,
    Room,
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
        """``amount`` may be negative: what was reserved and not used."""
        if bucket not in self.buckets:  # here too: of a measure without a limit nobody asks the total
            self._forget(oldest_bucket(bucket * BUCKET_MS))
        self.buckets[bucket] = max(0, self.buckets.get(bucket, 0) + amount)

    def total(self, now_ms: int) -> int:
        self._forget(oldest_bucket(now_ms))
        return sum(self.buckets.values())

    def _forget(self, oldest: int) -> None:
        """What was before the bucket ``oldest``."""
        for bucket in [bucket for bucket in self.buckets if bucket < oldest]:
            del self.buckets[bucket]

    def wait_ms(self, amount: int, limit: float, now_ms: int) -> int:
        """Until ``amount`` fits; 0: it does; -1: it never will."""
        excess = self.total(now_ms) + amount - limit
        if excess <= 0:
            return 0
        for bucket, used in sorted(self.buckets.items()):
            excess -= used
            if excess <= 0:
                return max(1, until_left_ms(bucket, now_ms))
        return -1

    def reset_ms(self, now_ms: int) -> int:
        used = [bucket for bucket, amount in self.buckets.items() if amount]
        return until_left_ms(max(used), now_ms) if used else 0


@dataclass(slots=True)
class Account:
    """One tenant's use."""

    requests: Window = field(default_factory=Window)
    tokens: Window = field(default_factory=Window)
    running: set[str] = field(default_factory=set)
    """Leases of requests under way."""
    day: int = 0
    day_tokens: int = 0

    def count(self, lease: str, bucket: int, tokens: int, now_ms: int) -> None:
        """An admitted request."""
        self.requests.add(bucket, 1)
        self.tokens.add(bucket, tokens)
        self.running.add(lease)
        self._turn_day(now_ms)
        self.day_tokens += tokens

    def settle(self, lease: str, bucket: int, difference: int, now_ms: int) -> None:
        """A request has ended that used ``difference`` tokens more than was reserved."""
        self.running.discard(lease)
        self.tokens.add(bucket, difference)
        self._turn_day(now_ms)
        if self.day == day_of(bucket):
            self.day_tokens = max(0, self.day_tokens + difference)

    def decide(self, limits: Limits, tokens: int, replicas: int, now_ms: int) -> Decision:
        """Whether one more request fits into this process's share: a limit divided by ``replicas``."""
        self._turn_day(now_ms)
        share = [None if limit is None else _share(limit, replicas) for limit in limits.in_order()]
        per_minute, tokens_per_minute, concurrent, _ = share
        waits = (
            0 if per_minute is None else self.requests.wait_ms(1, per_minute, now_ms),
            self._tokens_wait_ms(tokens, limits.tokens_per_minute, replicas, now_ms),
            1000 if concurrent is not None and len(self.running) >= concurrent else 0,
            self._quota_wait_ms(tokens, limits.tokens_per_day, replicas, now_ms),
        )
        wait = -1 if -1 in waits else max(waits)
        against = (m for m, each in zip(MEASURES, waits, strict=True) if (each < 0 if wait < 0 else each))
        refused: Measure | None = next(against, None)
        took = refused is None
        return Decision(
            refused,
            wait,
            _room(self.requests, limits.requests_per_minute, per_minute, int(took), now_ms),
            _room(self.tokens, limits.tokens_per_minute, tokens_per_minute, tokens * took, now_ms),
        )

    def _tokens_wait_ms(self, tokens: int, limit: int | None, replicas: int, now_ms: int) -> int:
        if limit is None:
            return 0
        return self.tokens.wait_ms(_tested(tokens, limit, replicas), _share(limit, replicas), now_ms)

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
    """What there has to be room for. A request that is within the limit and beyond this process's share of it
    passes when nothing else counts here, or it never would."""
    return tokens if tokens > limit else min(tokens, int(_share(limit, replicas)))


def _room(window: Window, limit: int | None, share: float | None, taken: int, now_ms: int) -> Room | None:
    if limit is None or share is None:
        return None
    left = max(0, int(share - window.total(now_ms) - taken))
    reset = until_left_ms(bucket_of(now_ms), now_ms) if taken else window.reset_ms(now_ms)
    return Room(limit, left, reset)
