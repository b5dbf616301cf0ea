"""The completion of prompts: the one core behind every client protocol."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import TypeVar

from baton.router.admission.gate import Gate
from baton.router.api.admission import check_room
from baton.router.api.audit import AuditLog
from baton.router.api.authentication import Authentication, not_allowed
from baton.router.api.choices import answer
from baton.router.api.grammars import GrammarCheck
from baton.router.api.job import Job
from baton.router.api.menu import called
from baton.router.api.meter import ModelMeters
from baton.router.api.readers import ElsewhereReader
from baton.router.api.relay import Relay, SlowClientError
from baton.router.api.scope import RequestScope, Surroundings
from baton.router.api.settings import ApiSettings
from baton.router.dispatch.types import ModelInfo, Ring
from baton.router.security.client import Client
from baton.router.security.salts import CacheSalts
from baton.router.shared.limits import Tenant
from baton.router.shared.state import SharedState
from baton.router.traces.store import Traces
from baton.telemetry.metrics import RouterMetrics
from baton.telemetry.shared import SharedStateMetrics
from baton.text.choice import Delta
from baton.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

T = TypeVar("T")


class CompletionService:
    """Completes prompts on a ring of workers. Stateless except for its metrics; one per process is enough."""

    def __init__(
        self,
        ring: Ring,
        tokenizer: Tokenizer,
        settings: ApiSettings,
        metrics: RouterMetrics,
        shared: SharedState | None = None,
        tenant: Tenant | None = None,
        names: Sequence[str] = (),
        authentication: Authentication | None = None,
        gate: Gate | None = None,
        audit: AuditLog | None = None,
        traces: Traces | None = None,
        salts: CacheSalts | None = None,
        elsewhere: ElsewhereReader | None = None,
    ) -> None:
        """``tenant`` is every client's unless ``authentication`` is given. ``names`` are what clients may
        call the model, its own name first; empty: the ring's name. ``gate``: None if no request waits in
        front of the ring. ``salts``: None for salts without a key. ``elsewhere``: None to read bodies of any
        size on the event loop."""
        self.ring = ring
        self.tokenizer = tokenizer
        self.settings = settings
        self.metrics = metrics
        self.shared = shared or SharedState(None, SharedStateMetrics(metrics.registry))
        self.names = tuple(names)
        self.authentication = authentication or Authentication(None, tenant or Tenant())
        self._gate = gate
        self.audit = audit
        self.traces = Traces() if traces is None else traces
        self._around = Surroundings(self.shared, gate, self.traces, ModelMeters(metrics), tokenizer)
        self._salts = salts or CacheSalts(b"")
        self.grammars = GrammarCheck(tokenizer, self.shared, metrics)
        self.elsewhere = elsewhere

    def serves(self, client: Client) -> bool:
        """Whether ``client`` may ask the model under any of its names."""
        model = self.ring.model
        names = self.names or (() if model is None else (model.name,))
        return any(map(client.may_ask, names))

    def model(self, name: str | None, client: Client) -> ModelInfo:
        """Return the served model, which a missing name means too; see `called` for what it raises."""
        return called(name, self.ring.model, self.names, allowed=self.serves(client))

    def check_room(self, client: Client) -> None:
        """Raise ApiError for a request that would be refused whatever it asks, before it is read. If workers
        schedule by priority, the request has to be read first."""
        model = self.ring.model
        if self._gate is not None and not (model is not None and model.takes_priorities):
            check_room(self._gate, client.tenant)

    def scope(self, job: Job) -> RequestScope:
        """Return the scope of one run of ``job``. Raises ApiError if its client is not known, or may not ask
        its model: whatever an endpoint has checked, nothing is computed for a stranger."""
        client = self.authentication.answerable(job.client)
        if not self.serves(client):
            raise not_allowed(job.model.name)
        return RequestScope(job, client.tenant, self._around)

    async def run(self, job: Job, scope: RequestScope | None = None) -> AsyncGenerator[tuple[int, Delta]]:
        """Yield the deltas of all choices of ``job``, each with its choice's index, as they come.

        Closing the generator cancels the request everywhere. Raises what entering ``scope`` raises before
        anything is done, and RingError if a choice fails, after the others are cancelled. ``scope`` has the
        headers about limits from the first delta on.
        """
        async with scope or self.scope(job) as entered:
            salt = self._salts.of(job.cache_salt)
            async with aclosing(answer(job, entered, salt, self.ring, self.tokenizer)) as deltas:
                async for index, delta in deltas:  # runs per token: must be cheap
                    entered.delivered(index, delta)
                    yield index, delta

    def relay(self, size: Callable[[T], int]) -> Relay[T]:
        """Return a relay for one stream; ``size`` returns the size of an item, in bytes."""
        settings = self.settings
        return Relay(size, max_bytes=settings.max_stream_backlog, patience_s=settings.slow_client_seconds)

    def cut_off(self, job: Job, error: SlowClientError) -> None:
        """Note that the client of ``job`` does not read its answer: count and log it."""
        log.warning("request %s is cut off, its client does not read: %s", job.request_id, error)
        self.metrics.slow_clients.labels(job.endpoint).inc()
        if job.record is not None:
            job.record.outcome = "slow_client"
