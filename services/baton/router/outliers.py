"""Workers that fail again and again, or are far slower than their like, get no requests for a while. Pure.

The streams' heartbeats find what is dead. This finds what lives and does harm: a worker that answers each
request with an error, and so always looks idle, or one on a device that has throttled. The rules are those
that Envoy made common for outlier detection, with latency beside failures.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from baton.router.placement import Role

Reason = Literal["failures", "latency"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EjectionRules:
    failures: int = 5
    """Requests in a row that failed, and none succeeded between."""
    slow_factor: float = 4.0
    """How many times the median of its like a worker's median must be."""
    slow_floor_s: float = 0.02
    """Medians below are never slow: they are noise."""
    samples: int = 16
    """What a median is of; with fewer there is none."""
    least_like: int = 3
    """Workers of a role with a median, without which none is compared."""
    base_s: float = 10.0
    """The first ejection; each further one is twice as long."""
    longest_s: float = 300.0
    forgiven_after_s: float = 60.0
    """Of good work, after which an ejection counts as the one before it."""
    most_of_role: float = 0.34
    """The part of a role that may be ejected at once; one always may, the last never."""


@dataclass(slots=True)
class _Record:
    role: Role
    failures: int = 0
    ejections: int = 0
    until: float = 0.0
    """When its ejection ends, or has ended."""
    times: deque[float] = field(default_factory=deque)


@dataclass(frozen=True, slots=True)
class Ejection:
    worker: str
    reason: Reason
    seconds: float
    told: str
    """Why, in words."""


class Outliers:
    """What the workers have done lately, by any name that stays the same while one is known."""

    def __init__(self, rules: EjectionRules | None = None, draw: random.Random | None = None) -> None:
        self.rules = rules or EjectionRules()
        self._draw = draw or random.Random()
        self._records: dict[str, _Record] = {}
        self._last_end = 0.0
        """When the last ejection ends that there has been."""

    def keep(self, workers: Mapping[str, Role | None]) -> None:
        """Those that there are now, with their roles, if they are known; the others are forgotten."""
        for name in self._records.keys() - workers.keys():
            del self._records[name]
        for name, role in workers.items():
            record = self._records.get(name)
            if role is not None and (record is None or record.role != role):
                self._records[name] = _Record(role)

    def failed(self, worker: str, now: float) -> Ejection | None:
        """A request has failed there, by the worker's fault. Returns the ejection this leads to."""
        record = self._records.get(worker)
        if record is None:
            return None
        record.failures += 1
        if record.failures < self.rules.failures:
            return None
        return self._eject(worker, record, now, "failures", f"{record.failures} requests failed in a row")

    def succeeded(self, worker: str) -> None:
        """A request got tokens from it, or ended well."""
        if (record := self._records.get(worker)) is not None:
            record.failures = 0

    def took(self, worker: str, seconds: float) -> None:
        """One step of what its role does; only those of like workers are compared."""
        if (record := self._records.get(worker)) is not None:
            record.times.append(seconds)
            if len(record.times) > self.rules.samples:
                record.times.popleft()

    def sweep(self, now: float) -> list[Ejection]:
        """Compare the workers of each role; to be called now and then. Returns new ejections."""
        found: list[Ejection] = []
        for role in {record.role for record in self._records.values()}:
            medians = {
                name: median(record.times)
                for name, record in self._records.items()
                if record.role == role and len(record.times) >= self.rules.samples and record.until <= now
            }
            found += self._slow(medians, now)
        self._forgive(now)
        return found

    def out(self, now: float) -> frozenset[str]:
        """Those that are ejected, mostly nobody."""
        if now >= self._last_end:
            return frozenset()
        return frozenset(name for name, record in self._records.items() if record.until > now)

    def ejected(self, worker: str, now: float) -> bool:
        record = self._records.get(worker)
        return record is not None and record.until > now

    def _slow(self, medians: Mapping[str, float], now: float) -> Iterable[Ejection]:
        if len(medians) < self.rules.least_like:
            return
        usual = median(medians.values())
        bound = max(self.rules.slow_floor_s, self.rules.slow_factor * usual)
        for name, taken in sorted(medians.items(), key=lambda item: -item[1]):
            if taken > bound:
                told = f"{1e3 * taken:.0f} ms a step, where {1e3 * usual:.0f} ms are usual"
                ejection = self._eject(name, self._records[name], now, "latency", told)
                if ejection is not None:
                    yield ejection

    def _eject(self, name: str, record: _Record, now: float, reason: Reason, told: str) -> Ejection | None:
        if record.until > now or not self._may_eject(record.role, now):
            return None
        longest = min(self.rules.longest_s, self.rules.base_s * 2.0 ** min(record.ejections, 16))
        seconds = longest * self._draw.uniform(0.8, 1.0)
        record.ejections += 1
        record.until = now + seconds
        self._last_end = max(self._last_end, record.until)
        record.failures = 0
        record.times.clear()  # it is judged by what it does afterwards
        return Ejection(name, reason, seconds, told)

    def _may_eject(self, role: Role, now: float) -> bool:
        like = [record for record in self._records.values() if record.role == role]
        out = sum(record.until > now for record in like)
        return out < min(len(like) - 1, max(1, int(self.rules.most_of_role * len(like))))

    def _forgive(self, now: float) -> None:
        for record in self._records.values():
            if record.ejections and now - record.until > self.rules.forgiven_after_s:
                record.ejections -= 1
                record.until = now  # the next one takes as long again
