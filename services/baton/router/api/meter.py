"""What a generating request contributes to the metrics."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from baton.router.api.goodput import Goodput
from baton.router.traces.record import Delivered
from baton.router.types import DEADLINE_EXCEEDED, Passage, RingError
from baton.telemetry.goodput import GoodputMetrics
from baton.telemetry.metrics import ModelMetrics
from baton.telemetry.stages import RequestStage, Stages
from baton.text.choice import Delta


@dataclass(frozen=True, slots=True)
class Meters:
    """Where requests for one model are counted."""

    metrics: ModelMetrics
    stages: Stages
    goodput: GoodputMetrics


@dataclass(frozen=True, slots=True)
class Arrival:
    """What is known of a request when it is its turn. Times are ``time.perf_counter``'s."""

    came: float
    """When it arrived."""
    asked: float
    """When it could be run, but for its turn."""
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
        self.passages: Sequence[Passage] = ()
        """Of each choice, once there are any."""

    def __enter__(self) -> RequestMeter:
        self._turn = time.perf_counter()
        self._metrics.in_flight(self._endpoint).inc()
        self._metrics.prompt_tokens.inc(self._arrival.prompt_tokens)
        self._metrics.prompt_length.observe(self._arrival.prompt_tokens)
        return self

    def delivered(self, index: int, delta: Delta) -> None:
        """Choice ``index`` got more tokens."""
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
        """The first token: what came before it is known."""
        self._first[index] = now
        self._metrics.time_to_first_token.observe(now - self._arrival.came)
        passage = self._passage(index)
        stages = self._stages_of(passage, now)
        self._stages.took(stages)
        self._goodput.began(now - self._arrival.came, stages, interrupted=passage.interruptions > 0)

    def _stages_of(self, passage: Passage, now: float) -> dict[RequestStage, float]:
        """They sum to the time to first token. What a ring does not tell of is in the last one."""
        marks: tuple[tuple[RequestStage, float | None], ...] = (
            ("prepare", self._arrival.asked),
            ("admission", self._turn),
            ("placement", passage.placed),
            ("prefill_queue", passage.begun),
            ("prefill", now),
        )
        stages: dict[RequestStage, float] = {}
        before = self._arrival.came
        for stage, at in marks:
            stages[stage] = 0.0 if at is None else max(0.0, at - before)
            before = before if at is None else max(before, at)
        return stages

    def _passage(self, index: int) -> Passage:
        return self.passages[index] if self.passages else Passage()

    def _finished(self, index: int, reason: str) -> None:
        self._finished_ones[index] = True
        self._unfinished -= 1
        self._metrics.ended(self._endpoint, reason)
        self._metrics.answer_length.observe(self._tokens[index])
        self._metrics.decode_time.observe(self._last[index] - self._first[index])
        self._goodput.ended(index, interrupted=self._passage(index).interruptions > 0)
        if self._tokens[index] > 1:
            seconds = self._last[index] - self._first[index]
            self._metrics.time_per_output_token.observe(seconds / (self._tokens[index] - 1))

    def deliveries(self) -> list[Delivered]:
        """What each choice got so far."""
        told = zip(self._first, self._last, self._tokens, self._finished_ones, strict=True)
        return [Delivered(*each) for each in told]

    def cached(self, tokens: int) -> None:
        """A prompt's tokens that a prefix cache held."""
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


def _is_clients_own(error: Exception) -> bool:
    """What a worker finds wrong with a request, and the end of its client's patience, are no failures of the
    service."""
    return isinstance(error, RingError) and (error.status < 500 or error.code == DEADLINE_EXCEEDED)


def _ended_by(error: BaseException | None) -> str:
    """A closed or cancelled generator raises outside of Exception: the client left."""
    if isinstance(error, RingError) and error.code == DEADLINE_EXCEEDED:
        return DEADLINE_EXCEEDED
    return "error" if isinstance(error, Exception) else "cancelled"
