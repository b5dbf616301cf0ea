"""The traces that a router keeps: of running requests, and of the requests that ended last."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from heapq import merge
from itertools import chain, islice

from baton.router.traces.origin import Origin, SpanContext
from baton.router.traces.record import RequestTrace, key_of

log = logging.getLogger(__name__)

_REQUEST_BYTES = 2000
_ANSWER_BYTES = 500
_ATTEMPT_BYTES = 2000
_CANDIDATE_BYTES = 500
_REPORT_BYTES = 800
"""Most bytes of each object; `tests/unit/test_traces.py` measures them. Requests that were placed between the
same reports share these."""


UNBEGUN_SHARE = 0.1
"""The share of the store for requests that were given to no worker, such as refused ones: a flood of them
must not evict requests that ran."""

MAX_SEARCHED = 10_000
"""Most requests that one list, or one search for a client's own id, looks at: the latest that ran and have
ended, and as many that were given to no worker. Running ones come on top. The event loop waits meanwhile."""


class _Tenant:
    """The ended requests of one tenant."""

    def __init__(self) -> None:
        self.kept: OrderedDict[str, RequestTrace] = OrderedDict()
        self.num_bytes = 0


class _Ended:
    """The traces of the latest requests that have ended, bounded in number and bytes. What makes room is the
    oldest trace of the tenant that has the most, so that a flood of one tenant's evicts its own."""

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, tuple[RequestTrace, int]] = OrderedDict()
        self._tenants: dict[str, _Tenant] = {}
        self.num_bytes = 0
        self.num_dropped = 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, trace: RequestTrace) -> None:
        size = size_of(trace)
        self._kept[trace.key] = trace, size
        tenant = self._tenants.setdefault(trace.tenant, _Tenant())
        tenant.kept[trace.key] = trace
        tenant.num_bytes += size
        self.num_bytes += size
        while len(self._kept) > self._max_requests or self.num_bytes > self._max_bytes:
            self._drop_one()

    def _drop_one(self) -> None:
        by_bytes = self.num_bytes > self._max_bytes
        name, fullest = max(
            self._tenants.items(), key=lambda item: item[1].num_bytes if by_bytes else len(item[1].kept)
        )
        key, _ = fullest.kept.popitem(last=False)
        _, size = self._kept.pop(key)
        fullest.num_bytes -= size
        self.num_bytes -= size
        self.num_dropped += 1
        if not fullest.kept:
            del self._tenants[name]

    def get(self, key: str) -> RequestTrace | None:
        return self._kept.get(key, (None, 0))[0]

    def latest(self, tenant: str | None) -> Iterator[RequestTrace]:
        """Return the latest traces that are searched, the latest first. ``tenant``: whose; None: all
        tenants'."""
        if tenant is None:
            return (trace for trace, _ in islice(reversed(self._kept.values()), MAX_SEARCHED))
        own = self._tenants.get(tenant)
        return iter(()) if own is None else islice(reversed(own.kept.values()), MAX_SEARCHED)


class Traces:
    """The traces of running and ended requests. Admission bounds the running ones, this store the ended ones.
    Event loop's thread only."""

    def __init__(
        self,
        max_requests: int = 1000,
        max_bytes: int = 16 << 20,
        on_end: Callable[[RequestTrace], None] = lambda _: None,
        sample: float | None = None,
    ) -> None:
        """``max_requests``, ``max_bytes``: bounds of the ended requests that are kept, the latest; a tenth of
        both is for requests that were given to no worker. ``on_end`` is called for each request that ends.
        ``sample``: the fraction exported of the requests whose clients do not decide it; None: nothing is
        exported."""
        unbegun = max(round(UNBEGUN_SHARE * max_requests), min(1, max_requests - 1))
        unbegun_bytes = round(UNBEGUN_SHARE * max_bytes)
        self._unbegun = _Ended(unbegun, unbegun_bytes)
        self._begun = _Ended(max_requests - unbegun, max_bytes - unbegun_bytes)
        self.max_requests = max_requests
        self.max_bytes = max_bytes
        self._on_end = on_end
        self._sample = sample
        self._running: dict[str, RequestTrace] = {}

    def __len__(self) -> int:
        return len(self._running) + len(self._begun) + len(self._unbegun)

    @property
    def num_bytes(self) -> int:
        """The estimated bytes of the ended requests."""
        return self._begun.num_bytes + self._unbegun.num_bytes

    @property
    def num_dropped(self) -> int:
        """The number of ended requests that had to make room for later ones."""
        return self._begun.num_dropped + self._unbegun.num_dropped

    def origin(self, client_id: str | None, traceparent: str | None) -> Origin:
        """Return the origin of a new request, from its headers."""
        if self._sample is None:
            return Origin(client_id)
        parent = None if traceparent is None else SpanContext.parse(traceparent)
        span = SpanContext.begin(self._sample) if parent is None else parent.child()
        return Origin(client_id, parent, span)

    def begin(self, trace: RequestTrace) -> None:
        self._running[trace.key] = trace

    def end(self, trace: RequestTrace, outcome: str) -> None:
        """Note that the request has ended, and export its trace."""
        trace.end(outcome)
        if self._running.pop(trace.key, None) is not trace:
            return
        begun = any(answer.attempts for answer in trace.answers)
        (self._begun if begun else self._unbegun).add(trace)
        try:
            self._on_end(trace)
        except Exception:  # a failed export must not fail the answer
            log.exception("request %s: its trace could not be exported", trace.request_id)

    def find(self, request_id: str, tenant: str | None) -> RequestTrace | None:
        """Return the trace of a request, found by the id of its answer, by the random part of that id, by the
        id of a choice at workers, or by the client's own id (the latest request with it, of the latest
        ones). ``tenant``: the tenant whose requests are searched; None: all tenants."""
        for key in (key_of(request_id), key_of(request_id.rpartition("-")[0])):
            trace = self._running.get(key) or self._begun.get(key) or self._unbegun.get(key)
            if trace is not None and tenant in (None, trace.tenant):
                return trace
        named = (trace for trace in self.latest(tenant) if trace.origin.client_id == request_id)
        return next(named, None)

    def latest(self, tenant: str | None) -> Iterator[RequestTrace]:
        """Return the traces of running requests, then of ended ones, the latest first, as far as they are
        searched."""
        kinds = self._begun.latest(tenant), self._unbegun.latest(tenant)
        ended = merge(*kinds, key=lambda trace: -(trace.ended or 0.0))
        return self._of(tenant, ended)

    def searched(self, tenant: str | None) -> Iterator[RequestTrace]:
        """Return the traces that `latest` returns, those that have ended in no order."""
        return self._of(tenant, chain(self._begun.latest(tenant), self._unbegun.latest(tenant)))

    def _of(self, tenant: str | None, ended: Iterable[RequestTrace]) -> Iterator[RequestTrace]:
        traces = chain(reversed(self._running.values()), ended)
        return traces if tenant is None else (trace for trace in traces if trace.tenant == tenant)


def size_of(trace: RequestTrace) -> int:
    attempts = {id(attempt): attempt for answer in trace.answers for attempt in answer.attempts}
    placed = [attempt.placed for attempt in attempts.values()]
    return (
        _REQUEST_BYTES
        + _ANSWER_BYTES * len(trace.answers)
        + _ATTEMPT_BYTES * len(attempts)
        + _CANDIDATE_BYTES * sum(len(each.considered) for each in placed)
        + _REPORT_BYTES * sum(len(each.reports) for each in placed)
    )
