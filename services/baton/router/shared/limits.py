"""Tenants, what they may use, and what a request is told of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WINDOW_MS = 60_000
BUCKET_MS = 250
"""A window is counted in buckets. The oldest counts whole until all of it has left the window, so no minute
ever has more than its limit, and a tenant that asks evenly gets 250 ms in 60 s, 0.4 %, less than it."""
WINDOW_BUCKETS = WINDOW_MS // BUCKET_MS
DAY_MS = 86_400_000

Measure = Literal["requests", "tokens", "concurrent", "quota"]
MEASURES: tuple[Measure, ...] = ("requests", "tokens", "concurrent", "quota")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None
    tokens_per_day: int | None = None
    """The quota: of a UTC day."""

    def __bool__(self) -> bool:
        return any(limit is not None for limit in self.in_order())

    def in_order(self) -> tuple[int | None, int | None, int | None, int | None]:
        """As in ``MEASURES``."""
        return self.requests_per_minute, self.tokens_per_minute, self.concurrent, self.tokens_per_day


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whoever requests are counted for."""

    name: str = "default"
    limits: Limits = Limits()
    weight: float = 1.0
    """Its share of what there is, against other tenants that want some too."""


@dataclass(frozen=True, slots=True)
class Room:
    """What is left of one limit."""

    limit: int
    remaining: int
    reset_ms: int
    """Until all of it is there again, if nothing more is used."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether one request may run. ``refused_by`` names the first limit that is against it, for ever if one
    is."""

    refused_by: Measure | None
    wait_ms: int = 0
    """Until the same request could be admitted; -1: it never can."""
    requests: Room | None = None
    tokens: Room | None = None
    bucket: int = 0
    """In which it is counted."""


def bucket_of(now_ms: int) -> int:
    return now_ms // BUCKET_MS


def day_of(bucket: int) -> int:
    """The UTC day in which a bucket begins, counted from 1970."""
    return bucket * BUCKET_MS // DAY_MS


def oldest_bucket(now_ms: int) -> int:
    """The first one that is in the window, or partly."""
    return (now_ms - WINDOW_MS) // BUCKET_MS


def until_left_ms(bucket: int, now_ms: int) -> int:
    """Until all of a bucket has left the window."""
    return max(0, (bucket + 1) * BUCKET_MS + WINDOW_MS - now_ms)
