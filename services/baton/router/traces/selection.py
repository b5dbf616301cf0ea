"""A selection of the traces that are kept: the latest ones that a list asks for, page by page."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import nlargest
from operator import attrgetter
from typing import NamedTuple

from baton.router.traces.phases import earliest_token
from baton.router.traces.record import RequestTrace

RUNNING, COMPLETED, CANCELLED = "running", "completed", "cancelled"
FAILED = "failed"
"""The outcome that selects all requests which ended with an error, whatever its code."""

_CURSOR = re.compile(r"([0-9]{1,12}\.[0-9]{1,9})-([0-9A-Za-z_-]{1,64})", re.ASCII)
_place: Callable[[RequestTrace], tuple[float, str]] = attrgetter("wall", "request_id")


class Position(NamedTuple):
    """The place of a request among all, by its arrival. The later one is the greater one."""

    wall: float
    """The time of arrival in seconds since 1970."""
    request_id: str
    """The request's id: two may arrive at once."""

    @classmethod
    def of(cls, trace: RequestTrace) -> Position:
        return cls(*_place(trace))

    @classmethod
    def parse(cls, cursor: str) -> Position | None:
        """Return the position of a cursor; None if it is none."""
        found = _CURSOR.fullmatch(cursor)
        return None if found is None else cls(float(found[1]), found[2])

    @property
    def cursor(self) -> str:
        return f"{self.wall!r}-{self.request_id}"


@dataclass(frozen=True, slots=True)
class Selection:
    """The requests that a list asks for. What is None does not matter."""

    limit: int
    model: str | None = None
    tenant: str | None = None
    outcome: str | None = None
    """The outcome of a request, or FAILED."""
    min_ttft_s: float | None = None
    """The least TTFT, in seconds. A request that runs without a token has waited for as long as it runs."""
    before: Position | None = None
    """The end of the page before: only requests that arrived earlier are selected."""

    def of(self, traces: Iterable[RequestTrace]) -> list[RequestTrace]:
        """Return the ``limit`` latest ones, the latest first."""
        # A page asks for this every few seconds, of thousands of requests: most conditions are not set.
        model, tenant, before, least = self.model, self.tenant, self.before, self.min_ttft_s
        if model is not None:
            traces = (each for each in traces if each.model == model)
        if tenant is not None:
            traces = (each for each in traces if each.tenant == tenant)
        if self.outcome is not None:
            traces = filter(self._has_outcome, traces)
        if before is not None:
            traces = (each for each in traces if _place(each) < before)
        if least is not None:
            traces = (each for each in traces if _waited_s(each) >= least)
        return nlargest(self.limit, traces, key=_place)

    def _has_outcome(self, trace: RequestTrace) -> bool:
        if self.outcome == FAILED:
            return trace.outcome not in (RUNNING, COMPLETED, CANCELLED)
        return trace.outcome == self.outcome


def _waited_s(trace: RequestTrace) -> float:
    """Return the seconds until a request's first token, or until now if it runs and has none; 0.0 for a
    request that ended without a token."""
    ttft = earliest_token(trace)
    if ttft is not None:
        return ttft
    return time.perf_counter() - trace.arrived if trace.ended is None else 0.0
