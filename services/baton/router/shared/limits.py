"""Tenants, their limits, and the decision about a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WINDOW_MS = 60_000
BUCKET_MS = 250
"""The length of a window's buckets. The oldest bucket counts whole until all of it has left the window: no
minute ever has more than its limit, and a tenant with an even rate gets 250 ms in 60 s, 0.4 %, less than its
limit."""
WINDOW_BUCKETS = WINDOW_MS // BUCKET_MS
DAY_MS = 86_400_000

Measure = Literal["requests", "tokens", "concurrent", "quota"]
MEASURES: tuple[Measure, ...] = ("requests", "tokens", "concurrent", "quota")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a tenant. None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None
    tokens_per_day: int | None = None
    """The quota of tokens in a UTC day."""

    def __bool__(self) -> bool:
        return any(limit is not None for limit in self.in_order())

    def in_order(self) -> tuple[int | None, int | None, int | None, int | None]:
        """Return the limits in the order of ``MEASURES``."""
        return self.requests_per_minute, self.tokens_per_minute, self.concurrent, self.tokens_per_day


@dataclass(frozen=True, slots=True)
class Tenant:
    """The tenant that requests are counted for."""

    name: str = "default"
    limits: Limits = Limits()
    weight: float = 1.0
    """The tenant's weight when it competes with other tenants for capacity."""


@dataclass(frozen=True, slots=True)
class RemainingLimit:
    """The rest of one limit."""

    limit: int
    remaining: int
    reset_ms: int
    """The time until the whole limit is available again if nothing more is used, in milliseconds."""


@dataclass(frozen=True, slots=True)
class LimitDecision:
    """The decision whether one request may run. ``refused_by`` is the first limit that refuses it, or the
    first that refuses it for ever if there is one."""

    refused_by: Measure | None
    wait_ms: int = 0
    """The time until the same request could be admitted, in milliseconds; -1: never."""
    requests: RemainingLimit | None = None
    tokens: RemainingLimit | None = None
    bucket: int = 0
    """The bucket in which the request is counted."""


def bucket_of(now_ms: int) -> int:
    return now_ms // BUCKET_MS


def day_of(bucket: int) -> int:
    """Return the UTC day in which a bucket begins, counted from 1970."""
    return bucket * BUCKET_MS // DAY_MS


def oldest_bucket(now_ms: int) -> int:
    """Return the first bucket that is at least partly in the window."""
    return (now_ms - WINDOW_MS) // BUCKET_MS


def until_left_ms(bucket: int, now_ms: int) -> int:
    """Return the time until all of a bucket has left the window, in milliseconds."""
    return max(0, (bucket + 1) * BUCKET_MS + WINDOW_MS - now_ms)
