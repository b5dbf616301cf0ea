"""The metrics of a generating request."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from baton.router.api.goodput import Goodput
from baton.router.dispatch.types import DEADLINE_EXCEEDED, RequestTimings, RingError
from baton.router.traces.record import Delivered
from baton.telemetry.goodput import GoodputMetrics
from baton.telemetry.metrics import ModelMetrics, RouterMetrics
from baton.telemetry.stages import RequestStage, Stages
from baton.text.choice import Delta


@dataclass(frozen=True, slots=True)
class Meters:
    """The metrics that requests for one model are counted in."""

    metrics: ModelMetrics
    stages: Stages
    goodput: GoodputMetrics


@dataclass(frozen=True, slots=True)
class Arrival:
    """What is known of a request when its turn comes. Times are ``time.perf_counter``'s."""

    came: float
    """The time at which the request arrived."""
    asked: float
    """The time at which the request was ready to run and began to wait for its turn."""
    prompt_tokens: int


class RequestMeter:
    """Times one request, as a context manager around its stream of deltas."""

    def __init__(self, meters: Meters, endpoint: str, arrival: Arrival, choices: int) -> None:
        self._metrics = meters.metrics
        self._stages = meters.stages
        self._endpoint = endpoint
        self._arrival = arrival
        self._turn = 0.0
        self._first = [0.0] * choices
        self._last = [0.0] * choices
        self._tokens = [0] * choices
        self._finished_ones = [False] * choices
        self._unfinished = choices
        self._goodput = Goodput(meters.goodput, meters.metrics.model, choices)
        self.timings: Sequence[RequestTimings] = ()
        """The timings of each choice, once there are any."""

    def __enter__(self) -> RequestMeter:
        self._turn = time.perf_counter()
        self._metrics.in_flight(self._endpoint).inc()
        self._metrics.prompt_tokens.inc(self._arrival.prompt_tokens)
        self._metrics.prompt_length.observe(self._arrival.prompt_tokens)
        return self

    def delivered(self, index: int, delta: Delta) -> None:
        """Observe the tokens of ``delta``, which choice ``index`` got."""
        metrics, now = self._metrics, time.perf_counter()
        if delta.token_ids:
            if self._tokens[index] == 0:
                self._begins(index, now)
            else:
                gap = now - self._last[index]
                metrics.inter_token_latency.observe(gap)
                self._goodput.gap(index, gap)
            self._last[index] = now
            self._tokens[index] += len(delta.token_ids)
            metrics.generated_tokens.inc(len(delta.token_ids))
        if delta.finish_reason is not None:
            self._finished(index, delta.finish_reason)

    def _begins(self, index: int, now: float) -> None:
        """Observe the stages before a choice's first token."""
        self._first[index] = now
        self._metrics.time_to_first_token.observe(now - self._arrival.came)
        timings = self._timings_of(index)
        stages = self._stages_of(timings, now)
        self._stages.observe(stages)
        self._goodput.began(now - self._arrival.came, stages, interrupted=timings.interruptions > 0)

    def _stages_of(self, timings: RequestTimings, now: float) -> dict[RequestStage, float]:
        """Return the stages, which sum to the time to first token. Stages that a ring does not report are
        part of the next one."""
        marks: tuple[tuple[RequestStage, float | None], ...] = (
            ("prepare", self._arrival.asked),
            ("admission", self._turn),
            ("placement", timings.placed),
            ("prefill_queue", timings.begun),
            ("prefill", now),
        )
        stages: dict[RequestStage, float] = {}
        before = self._arrival.came
        for stage, at in marks:
            stages[stage] = 0.0 if at is None else max(0.0, at - before)
            before = before if at is None else max(before, at)
        return stages

    def _timings_of(self, index: int) -> RequestTimings:
        return self.timings[index] if self.timings else RequestTimings()

    def _finished(self, index: int, reason: str) -> None:
        self._finished_ones[index] = True
        self._unfinished -= 1
        self._metrics.ended(self._endpoint, reason)
        self._metrics.answer_length.observe(self._tokens[index])
        self._metrics.decode_time.observe(self._last[index] - self._first[index])
        self._goodput.ended(index, interrupted=self._timings_of(index).interruptions > 0)
        if self._tokens[index] > 1:
            seconds = self._last[index] - self._first[index]
            self._metrics.time_per_output_token.observe(seconds / (self._tokens[index] - 1))

    def deliveries(self) -> list[Delivered]:
        """Return what each choice got so far."""
        told = zip(self._first, self._last, self._tokens, self._finished_ones, strict=True)
        return [Delivered(*each) for each in told]

    def cached(self, tokens: int) -> None:
        """Count a prompt's tokens that a prefix cache held."""
        self._metrics.cached_prompt_tokens.inc(tokens)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._metrics.in_flight(self._endpoint).dec()
        if self._unfinished:
            self._metrics.ended(self._endpoint, _ended_by(error), self._unfinished)
            if isinstance(error, Exception) and not _is_clients_own(error):
                self._goodput.failed(error.code if isinstance(error, RingError) else "internal_error")
        else:
            self._metrics.e2e_latency.observe(time.perf_counter() - self._arrival.came)
            self._goodput.over()


class ModelMeters:
    """The meters of requests to a ring's model, whose name does not change while the ring is there."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics
        self._made: Meters | None = None

    def of(self, model: str, endpoint: str, arrival: Arrival, choices: int) -> RequestMeter:
        """Return the meter of one request."""
        if self._made is None or self._made.metrics.model != model:  # the first request whose turn has come
            metrics = self._metrics
            self._made = Meters(
                ModelMetrics(metrics, model), metrics.stages.of("router", model), metrics.goodput
            )
        return RequestMeter(self._made, endpoint, arrival, choices)


def _is_clients_own(error: Exception) -> bool:
    """Whether ``error`` is no failure of the service: a fault of the request that a worker found, or the
    client's deadline."""
    return isinstance(error, RingError) and (error.status < 500 or error.code == DEADLINE_EXCEEDED)


def _ended_by(error: BaseException | None) -> str:
    """Return the finish reason of choices that ``error`` ended. A closed or cancelled generator raises
    outside of Exception: the client left."""
    if isinstance(error, RingError) and error.code == DEADLINE_EXCEEDED:
        return DEADLINE_EXCEEDED
    return "error" if isinstance(error, Exception) else "cancelled"
