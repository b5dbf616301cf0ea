"""The scope of one request's answer: its audit record, trace, limits, turn and metrics."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType

from baton.router.admission.gate import Gate
from baton.router.admission.queue import QueueEntry, RefusedError
from baton.router.api.admission import asked_of, limit_headers, refusal, refused, reservation, used_tokens
from baton.router.api.audit import outcome_of
from baton.router.api.ignored import ignored_header
from baton.router.api.job import Job
from baton.router.api.meter import Arrival, ModelMeters
from baton.router.dispatch.types import Request
from baton.router.shared.limits import Tenant
from baton.router.shared.state import Lease, SharedState
from baton.router.traces.record import AnswerTrace, RequestTrace
from baton.router.traces.store import Traces
from baton.text.choice import Delta
from baton.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the scopes of all requests to one model share."""

    shared: SharedState
    """The limits of all tenants."""
    gate: Gate | None
    """The queue in front of the ring; None: no request waits there."""
    traces: Traces
    meters: ModelMeters
    tokenizer: Tokenizer
    """The tokenizer that decodes prompts for the audit log."""


class RequestScope:
    """The scope of one run of ``job``, as an async context manager.

    Entering notes the request for the audit log, begins a trace, passes the limits of ``tenant``, waits for
    the request's turn and starts the meter, in this order. Leaving ends each in the reverse order, and passes
    on the error that ended the answer, if any.

    Entering raises ApiError, with ``Retry-After``: 429 if a limit is reached or the tenant has more waiting
    than its share, and 503 if all tenants together have too much waiting; and RingError if the request's
    deadline passes before its turn. Nothing is held then.
    """

    def __init__(self, job: Job, tenant: Tenant, around: Surroundings) -> None:
        self._job = job
        self._tenant = tenant
        self._around = around
        self._lease: Lease | None = None
        self._entry: QueueEntry | None = None
        self._generated = 0
        self._cached = 0
        self.stack = ExitStack()
        """The contexts of requests to the ring, which are left before everything else."""
        self.headers: Mapping[str, str] = {}
        """The headers that tell the client about its limits, once the request has passed them."""
        self.trace = RequestTrace(
            request_id=job.request_id,
            endpoint=job.endpoint,
            model=job.model.name,
            tenant=tenant.name,
            origin=job.origin,
            prompt_tokens=job.prompt_tokens,
            arrived=job.started,
            answers=[AnswerTrace(index) for index in range(job.choices)],
        )

    async def __aenter__(self) -> RequestScope:
        job, around = self._job, self._around
        if job.record is not None:
            job.record.asks(job.model.name, job.prompts, job.prompt_tokens, around.tokenizer)
            self.trace.read = time.perf_counter()  # its preparation ends here
        around.traces.begin(self.trace)
        try:
            await self._pass_limits()
            await self._wait_for_turn()
            arrival = Arrival(job.started, self.trace.read, job.prompt_tokens)
            self._meter = around.meters.of(job.model.name, job.endpoint, arrival, job.choices)
            self.stack.enter_context(self._meter)
        except BaseException as error:
            self._leave(error)
            raise
        self.trace.deliveries = self._meter.deliveries
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stack.__exit__(kind, error, trace)
        finally:
            self._leave(error)

    def sends(self, requests: Sequence[Request]) -> None:
        """Note ``requests`` that go to the ring, one for each choice."""
        self._meter.timings = [request.timings for request in requests]

    def delivered(self, index: int, delta: Delta) -> None:
        """Note ``delta``, which choice ``index`` got. Called per token: must be cheap."""
        self._generated += len(delta.token_ids)
        self._meter.delivered(index, delta)
        if delta.cached_tokens and index % self._job.n == 0:  # a prompt counts once
            self._cached += delta.cached_tokens
            self._meter.cached(delta.cached_tokens)

    async def _pass_limits(self) -> None:
        tenant, tokens = self._tenant, reservation(self._job)
        decision, self._lease = await self._around.shared.admit(tenant, tokens)
        self.headers = {**limit_headers(decision), **ignored_header(self._job.ignored)}
        self.trace.admitted = time.perf_counter()
        if decision.refused_by is not None:
            raise refusal(tenant, decision, tokens)

    async def _wait_for_turn(self) -> None:
        gate = self._around.gate
        if gate is not None:
            try:
                self._entry = await gate.enter(asked_of(self._job, self._tenant))
            except RefusedError as error:
                raise refused(self._tenant.name, error) from None
        self.trace.turn = time.perf_counter()

    def _leave(self, error: BaseException | None) -> None:
        """Leave each part that was entered, even if another cannot be left."""
        gate, entry = self._around.gate, self._entry
        try:
            if gate is not None and entry is not None:
                gate.leave(entry, self._generated, completed=error is None)
        finally:
            try:
                self._settle()
            finally:
                self._end(outcome_of(error))

    def _settle(self) -> None:
        """Settle the lease. A request that ends before its turn has used no tokens, not even its prompt's."""
        if self._lease is not None:
            used = 0 if self.trace.turn is None else used_tokens(self._job, self._generated)
            self._around.shared.settle(self._lease, used)

    def _end(self, outcome: str) -> None:
        self._around.traces.end(self.trace, outcome)
        record = self._job.record
        if record is not None:
            record.completion_tokens, record.cached_tokens = self._generated, self._cached
            record.outcome = record.outcome or outcome
