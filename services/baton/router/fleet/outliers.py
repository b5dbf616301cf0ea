"""Outlier detection: workers that fail repeatedly, or are far slower than others of their role, get no
requests for a while. Pure.

The heartbeats of the streams find dead workers. Outlier detection finds workers that live and do harm: a
worker that answers each request with an error, and so always looks idle, or one on a device that has
throttled. The rules are those of Envoy's outlier detection, with latency beside failures.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from baton.core.role import Role

Reason = Literal["failures", "latency"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EjectionRules:
    failures: int = 5
    """Failed requests in a row after which a worker is ejected."""
    slow_factor: float = 4.0
    """Factor by which a worker's median must exceed the median of its role to be slow."""
    slow_floor_s: float = 0.02
    """The median below which no worker is slow, as differences there are noise."""
    samples: int = 16
    """Samples that a median is taken of; a worker with fewer has none."""
    least_like: int = 3
    """Fewest workers of a role with a median for the role to be compared."""
    base_s: float = 10.0
    """The length of the first ejection; each further one is twice as long, up to ``max_s``."""
    max_s: float = 300.0
    forgiven_after_s: float = 60.0
    """The time after an ejection until it no longer lengthens the next one."""
    max_of_role: float = 0.34
    """The share of a role that may be ejected at once; one worker always may, the last one never."""


@dataclass(slots=True)
class _Record:
    role: Role
    failures: int = 0
    ejections: int = 0
    until: float = 0.0
    """The end of the worker's last ejection."""
    times: deque[float] = field(default_factory=deque)


@dataclass(frozen=True, slots=True)
class Ejection:
    worker: str
    reason: Reason
    seconds: float
    told: str
    """The reason in words, for a log."""


class Outliers:
    """The recent failures and step times of workers, by a name that stays while a worker is known."""

    def __init__(self, rules: EjectionRules | None = None, draw: random.Random | None = None) -> None:
        self.rules = rules or EjectionRules()
        self._draw = draw or random.Random()
        self._records: dict[str, _Record] = {}
        self._last_end = 0.0
        """The latest end of any ejection so far."""

    def keep(self, workers: Mapping[str, Role | None]) -> None:
        """Replace the list of workers, each with its role or None if that is unknown; forget the others."""
        for name in self._records.keys() - workers.keys():
            del self._records[name]
        for name, role in workers.items():
            record = self._records.get(name)
            if role is not None and (record is None or record.role != role):
                self._records[name] = _Record(role)

    def failed(self, worker: str, now: float) -> Ejection | None:
        """Count a request that failed by the worker's fault. Returns the ejection that follows, if any."""
        record = self._records.get(worker)
        if record is None:
            return None
        record.failures += 1
        if record.failures < self.rules.failures:
            return None
        return self._eject(worker, record, now, "failures", f"{record.failures} requests failed in a row")

    def succeeded(self, worker: str) -> None:
        """Note that a request got tokens from the worker, or ended well."""
        if (record := self._records.get(worker)) is not None:
            record.failures = 0

    def observe(self, worker: str, seconds: float) -> None:
        """Note the time of one step, in seconds; only workers of one role are compared."""
        if (record := self._records.get(worker)) is not None:
            record.times.append(seconds)
            if len(record.times) > self.rules.samples:
                record.times.popleft()

    def sweep(self, now: float) -> list[Ejection]:
        """Compare the workers of each role; called regularly. Returns new ejections."""
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
        """Return the workers that are ejected, usually none."""
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
        longest = min(self.rules.max_s, self.rules.base_s * 2.0 ** min(record.ejections, 16))
        seconds = longest * self._draw.uniform(0.8, 1.0)
        record.ejections += 1
        record.until = now + seconds
        self._last_end = max(self._last_end, record.until)
        record.failures = 0
        record.times.clear()  # the worker is judged by its later steps only
        return Ejection(name, reason, seconds, told)

    def _may_eject(self, role: Role, now: float) -> bool:
        like = [record for record in self._records.values() if record.role == role]
        out = sum(record.until > now for record in like)
        return out < min(len(like) - 1, max(1, int(self.rules.max_of_role * len(like))))

    def _forgive(self, now: float) -> None:
        for record in self._records.values():
            if record.ejections and now - record.until > self.rules.forgiven_after_s:
                record.ejections -= 1
                record.until = now  # forgiving the next ejection takes as long again
