"""Completing prompts: the one core behind every client protocol."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

from baton.request.sampling import for_choice
from baton.router.admission.gate import Gate
from baton.router.api.admission import Ticket, fitted
from baton.router.api.authentication import Authentication, not_allowed
from baton.router.api.choices import Choice, merge
from baton.router.api.completion import complete
from baton.router.api.elsewhere import ElsewhereReader
from baton.router.api.grammars import GrammarCheck
from baton.router.api.menu import called
from baton.router.api.meter import Arrival, Meters, RequestMeter
from baton.router.api.prompts import Echo
from baton.router.api.queued import Queued, asked_of, check_room
from baton.router.api.relay import Relay, SlowClientError
from baton.router.api.settings import ApiSettings
from baton.router.audit import LONGEST_PROMPT, MOST_PROMPTS, AuditLog, Following, Record
from baton.router.security.client import Client
from baton.router.security.salts import CacheSalts
from baton.router.shared.limits import Tenant
from baton.router.shared.state import SharedState
from baton.router.traces.origin import NOWHERE, Origin
from baton.router.traces.record import AnswerTrace, RequestTrace
from baton.router.traces.store import Traced, Traces
from baton.router.types import ModelInfo, Request, Ring
from baton.sampling_params import SamplingParams
from baton.telemetry.metrics import ModelMetrics, RouterMetrics
from baton.telemetry.shared import SharedStateMetrics
from baton.text.choice import ChoiceText, Delta
from baton.text.stop import StopMatcher, StopStrings
from baton.text.tokenizer import Tokenizer
from baton.tools.answer import AnswerFormat
from baton.urgency import CALM, Urgency

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A checked request: prompts that fit, parameters in range. Choice ``p * n + i`` answers prompt ``p``.

    ``request_id`` is minted here, never a client's: workers know requests by it.
    """

    request_id: str
    endpoint: str
    started: float  # time.perf_counter() when the request arrived
    model: ModelInfo
    prompts: list[list[int]]
    params: SamplingParams
    urgency: Urgency = CALM
    n: int = 1
    record: Record | None = None
    """Of the audit log."""
    cache_salt: bytes = b""
    """Among whom cached blocks are shared; see `Client.cache_salt`."""
    seeded: bool = False  # whether the client gave the seed
    skip_special_tokens: bool = True
    echoes: Sequence[Echo] = ()
    """What the answers begin with, for each prompt; empty: they begin with what is generated."""
    only_echo: bool = False
    """The answer is the echo alone: what is generated beside it is not told."""
    prompt_logprobs: int | None = None
    """As the client asked; ``params`` may have more, for the echo."""
    tokens_as_ids: bool = False
    """Log-probabilities name tokens by their ids."""
    client: Client | None = None
    """Who asks; None: whoever may where there are no keys."""
    origin: Origin = NOWHERE
    open_ended: bool = False
    """The client left open how long the answers may be: ``params`` has all that the context has room for."""
    format: AnswerFormat | None = None
    """How an answer's text becomes reasoning, content and calls; None: it is the content."""

    @property
    def choices(self) -> int:
        return self.n * len(self.prompts)


@dataclass(slots=True)
class Usage:
    """Tokens of one request so far. A prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0

    @classmethod
    def of(cls, job: Job) -> Usage:
        return cls(sum(map(len, job.prompts)))

    def add(self, job: Job, index: int, delta: Delta) -> None:
        """Count what choice ``index`` got; its first choice speaks for a prompt's cached tokens."""
        self.completion_tokens += len(delta.token_ids)
        if index % job.n == 0:
            self.cached_tokens += delta.cached_tokens


class CompletionService:
    """Completes prompts on a ring of workers. Stateless but for its metrics; one per process is enough."""

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
        """``tenant`` is everybody's, where no ``authentication`` says otherwise. ``names`` are what clients
        may call the model, by its own name first; none: as the ring does. ``gate``: None, and nobody waits in
        front of the ring. ``salts``: None, and they are keyed with nothing. ``elsewhere``: None, and bodies
        of any size are read on the event loop."""
        self.ring = ring
        self.tokenizer = tokenizer
        self.settings = settings
        self.metrics = metrics
        self._meters: Meters | None = None
        self.shared = shared or SharedState(None, SharedStateMetrics(metrics.registry))
        self.names = tuple(names)
        self.authentication = authentication or Authentication(None, tenant or Tenant())
        self._gate = gate
        self.audit = audit
        self.traces = Traces() if traces is None else traces
        self._salts = salts or CacheSalts(b"")
        self.grammars = GrammarCheck(tokenizer, self.shared, metrics)
        self.elsewhere = elsewhere

    def tenant(self, client: Client | None) -> Tenant:
        """Whose limits the requests of ``client`` count for. Raises ApiError (401) when nobody is known where
        keys are needed."""
        return self.authentication.answerable(client).tenant

    def serves(self, client: Client | None) -> bool:
        """Whether ``client`` may ask the model, by whichever of its names its key says so."""
        model = self.ring.model
        names = self.names or (() if model is None else (model.name,))
        return client is None or any(map(client.may_ask, names))

    def model(self, name: str | None, client: Client | None = None) -> ModelInfo:
        """The served model, which no name means too; see `called` for what it raises."""
        return called(name, self.ring.model, self.names, allowed=self.serves(client))

    def check_room(self, client: Client | None) -> None:
        """Raises ApiError for a request that would be refused whatever it asks, before it is read. Where
        workers heed priorities, it has to be read first."""
        model = self.ring.model
        if self._gate is not None and not (model is not None and model.takes_priorities):
            check_room(self._gate, self.authentication.answerable(client).tenant)

    def fitted(self, job: Job, *, prompt_param: str, max_tokens_param: str = "max_tokens") -> Job:
        """``job`` within its tenant's limits of tokens; see `admission.fitted` for what it raises."""
        tenant = self.tenant(job.client)
        return fitted(job, tenant, prompt_param=prompt_param, max_tokens_param=max_tokens_param)

    def ticket(self, job: Job) -> Ticket:
        """For one run of ``job``. Raises ApiError when nobody stands for it, or its client may not ask its
        model: whatever an endpoint has looked at, nothing is computed for a stranger."""
        client = self.authentication.answerable(job.client)
        if not self.serves(client):
            raise not_allowed(job.model.name)
        return Ticket(self.shared, client.tenant, job)

    async def run(self, job: Job, ticket: Ticket | None = None) -> AsyncGenerator[tuple[int, Delta]]:
        """The deltas of all choices of ``job``, each with its choice's index, as they come.

        Closing the generator cancels the request everywhere. Raises ApiError (429, 503) before anything is
        done for a request that its tenant's limits are against, or that would wait for its turn too long, and
        RingError when a choice fails, after cancelling the others. ``ticket`` tells what is left of the
        limits, from the first delta on.
        """
        self._note(job)
        asked = time.perf_counter()
        ticket = ticket or self.ticket(job)
        with Following(job.record), Traced(self.traces, _trace_of(job, ticket)) as trace:
            async with ticket as admitted, self._turn(job, trace) as turn:
                admitted.begin()
                with self._meter(job, asked) as meter, ExitStack() as stack:
                    requests = self._requests(job, trace)
                    meter.passages = [request.passage for request in requests]
                    trace.deliveries = meter.deliveries
                    async with aclosing(merge(self._choices(job, requests, stack))) as deltas:
                        async for index, delta in deltas:  # for every token: as little as may be
                            admitted.generated(delta.token_ids)
                            turn.generated(len(delta.token_ids))
                            meter.delivered(index, delta)
                            if job.record is not None or delta.cached_tokens:
                                _note_delta(job, index, delta, meter)
                            yield index, delta

    def _note(self, job: Job) -> None:
        """What the audit log is to tell of a job."""
        record = job.record
        if record is None:
            return
        record.model = job.model.name
        record.prompt_tokens = sum(map(len, job.prompts))
        if record.with_prompts:
            record.prompts = [
                self.tokenizer.decode(prompt[:LONGEST_PROMPT], False)[:LONGEST_PROMPT]
                for prompt in job.prompts[:MOST_PROMPTS]
            ]

    def relay(self, size: Callable[[T], int]) -> Relay[T]:
        """For one stream; ``size`` is that of what it carries, in bytes."""
        settings = self.settings
        return Relay(size, most_bytes=settings.max_stream_backlog, patience_s=settings.slow_client_seconds)

    def cut_off(self, job: Job, error: SlowClientError) -> None:
        """The client of ``job`` does not read its answer: count it, and say so."""
        log.warning("request %s is cut off, its client does not read: %s", job.request_id, error)
        self.metrics.slow_clients.labels(job.endpoint).inc()
        if job.record is not None:
            job.record.outcome = "slow_client"

    def _turn(self, job: Job, trace: RequestTrace) -> Queued:
        client = self.authentication.answerable(job.client)
        return Queued(self._gate, asked_of(job, client.tenant), trace)

    def _meter(self, job: Job, asked: float) -> RequestMeter:
        arrival = Arrival(job.started, asked, sum(map(len, job.prompts)))
        return RequestMeter(self._meters_of(job.model.name), job.endpoint, arrival, job.choices)

    def _meters_of(self, model: str) -> Meters:
        """A ring's model has one name for as long as the ring is there."""
        if self._meters is None or self._meters.metrics.model != model:
            metrics = self.metrics
            self._meters = Meters(
                ModelMetrics(metrics, model), metrics.stages.of("router", model), metrics.goodput
            )
        return self._meters

    def _requests(self, job: Job, trace: RequestTrace) -> list[Request]:
        """One for each choice of ``job``."""
        return [
            Request(
                f"{job.request_id}-{index}",
                self._params(job, index),
                self._salts.of(job.cache_salt),
                trace=trace.answers[index],
            )
            for index in range(job.choices)
        ]

    def _choices(self, job: Job, requests: Sequence[Request], stack: ExitStack) -> list[Choice]:
        """All choices of ``job``, for as long as ``stack`` is open."""
        stops = StopStrings(job.params.stop) if job.params.stop else None
        choices: list[Choice] = []
        for first in range(0, job.choices, job.n):
            alike = requests[first : first + job.n]
            answers = stack.enter_context(self.ring.generate(job.prompts[first // job.n], alike, job.urgency))
            choices += [
                complete(index, chunks, self._text(job, first // job.n, request.params, stops), job.record)
                for index, request, chunks in zip(count(first), alike, answers, strict=False)
            ]
        return choices

    @staticmethod
    def _params(job: Job, index: int) -> SamplingParams:
        # A given seed means the same for each of several prompts; a drawn one must not make them alike.
        return for_choice(job.params, index % job.n if job.seeded else index)

    def _text(self, job: Job, prompt: int, params: SamplingParams, stops: StopStrings | None) -> ChoiceText:
        detokenizer = self.tokenizer.detokenizer(
            skip_special_tokens=job.skip_special_tokens,
            kept=job.format.marker_ids if job.format else frozenset(),
            after=job.prompts[prompt],
        )
        return ChoiceText(
            params,
            detokenizer,
            StopMatcher(stops) if stops else None,
            echo=job.echoes[prompt].text if job.echoes else "",
            only_echo=job.only_echo,
        )


def _trace_of(job: Job, ticket: Ticket) -> RequestTrace:
    ticket.trace = RequestTrace(
        request_id=job.request_id,
        endpoint=job.endpoint,
        model=job.model.name,
        tenant=ticket.tenant.name,
        origin=job.origin,
        prompt_tokens=sum(map(len, job.prompts)),
        arrived=job.started,
        answers=[AnswerTrace(index) for index in range(job.choices)],
    )
    return ticket.trace


def _note_delta(job: Job, index: int, delta: Delta, meter: RequestMeter) -> None:
    """What only some deltas tell, or only an audit log wants to know."""
    cached = delta.cached_tokens if index % job.n == 0 else 0
    if cached:
        meter.cached(cached)
    if job.record is not None:
        job.record.completion_tokens += len(delta.token_ids)
        job.record.cached_tokens += cached
