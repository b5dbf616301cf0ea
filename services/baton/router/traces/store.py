"""The traces that a router keeps: of the requests that run, and of the last ones that have ended."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from heapq import merge
from types import TracebackType

from baton.router.audit import outcome_of
from baton.router.traces.origin import Origin, SpanContext
from baton.router.traces.record import RequestTrace, key_of

log = logging.getLogger(__name__)

_REQUEST_BYTES = 2000
_ANSWER_BYTES = 500
_ATTEMPT_BYTES = 2000
_CANDIDATE_BYTES = 500
_REPORT_BYTES = 800
"""What each takes at most; `tests/unit/test_traces.py` measures it. Requests that were placed between the
same reports share these."""


UNBEGUN_SHARE = 0.1
"""Of what is kept, for requests that no worker was given, such as those refused: a flood of them is not to
drive out those that ran."""


class _Ended:
    """Traces of requests that have ended: the latest, as far as their numbers and bytes allow."""

    def __init__(self, most_requests: int, most_bytes: int) -> None:
        self._most_requests = most_requests
        self._most_bytes = most_bytes
        self._kept: OrderedDict[str, tuple[RequestTrace, int]] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, trace: RequestTrace) -> None:
        size = size_of(trace)
        self._kept[trace.key] = trace, size
        self.num_bytes += size
        while len(self._kept) > self._most_requests or self.num_bytes > self._most_bytes:
            _, (_, gone) = self._kept.popitem(last=False)
            self.num_bytes -= gone

    def get(self, key: str) -> RequestTrace | None:
        return self._kept.get(key, (None, 0))[0]

    def latest(self) -> list[RequestTrace]:
        """The latest first."""
        return [trace for trace, _ in reversed(self._kept.values())]


class Traces:
    """Event loop's thread only. What runs is bounded by what a router lets in; what has ended, here."""

    def __init__(
        self,
        most_requests: int = 1000,
        most_bytes: int = 16 << 20,
        on_end: Callable[[RequestTrace], None] = lambda _: None,
        sample: float | None = None,
    ) -> None:
        """At most so many that have ended are kept, and of so many bytes, the latest; a tenth of both is for
        those that no worker was given. ``on_end`` hears of each request that ends. ``sample``: the share of
        the requests that are exported, of those whose clients do not say; None: nothing is."""
        unbegun = max(round(UNBEGUN_SHARE * most_requests), min(1, most_requests - 1))
        unbegun_bytes = round(UNBEGUN_SHARE * most_bytes)
        self._unbegun = _Ended(unbegun, unbegun_bytes)
        self._begun = _Ended(most_requests - unbegun, most_bytes - unbegun_bytes)
        self._on_end = on_end
        self._sample = sample
        self._running: dict[str, RequestTrace] = {}

    def __len__(self) -> int:
        return len(self._running) + len(self._begun) + len(self._unbegun)

    @property
    def num_bytes(self) -> int:
        """Of those that have ended, as far as can be told."""
        return self._begun.num_bytes + self._unbegun.num_bytes

    def origin(self, client_id: str | None, traceparent: str | None) -> Origin:
        """From the headers of a request that has just come."""
        if self._sample is None:
            return Origin(client_id)
        parent = None if traceparent is None else SpanContext.parse(traceparent)
        span = SpanContext.begin(self._sample) if parent is None else parent.child()
        return Origin(client_id, parent, span)

    def begin(self, trace: RequestTrace) -> None:
        self._running[trace.key] = trace

    def end(self, trace: RequestTrace, outcome: str) -> None:
        """The request is over."""
        trace.end(outcome)
        if self._running.pop(trace.key, None) is not trace:
            return
        begun = any(answer.attempts for answer in trace.answers)
        (self._begun if begun else self._unbegun).add(trace)
        try:
            self._on_end(trace)
        except Exception:  # the answer is not to suffer
            log.exception("request %s: its trace could not be exported", trace.request_id)

    def find(self, request_id: str, tenant: str | None) -> RequestTrace | None:
        """The trace of a request, by the id of its answer, by the random part of that, as workers call one of
        its choices, or by the id that its client gave it, of which the latest. ``tenant``: whose requests may
        be told of; None: everybody's."""
        for key in (key_of(request_id), key_of(request_id.rpartition("-")[0])):
            trace = self._running.get(key) or self._begun.get(key) or self._unbegun.get(key)
            if trace is not None and tenant in (None, trace.tenant):
                return trace
        named = (trace for trace in self.latest(tenant) if trace.origin.client_id == request_id)
        return next(named, None)

    def latest(self, tenant: str | None) -> Iterator[RequestTrace]:
        """Those that run, then those that ended last."""
        ended = merge(self._begun.latest(), self._unbegun.latest(), key=lambda trace: -(trace.ended or 0.0))
        traces = (*reversed(self._running.values()), *ended)
        return (trace for trace in traces if tenant in (None, trace.tenant))


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


class Traced:
    """Keeps the trace of a request while it runs, as a context manager around its answer."""

    def __init__(self, traces: Traces, trace: RequestTrace) -> None:
        self._traces = traces
        self._trace = trace

    def __enter__(self) -> RequestTrace:
        self._traces.begin(self._trace)
        return self._trace

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._traces.end(self._trace, outcome_of(error))
