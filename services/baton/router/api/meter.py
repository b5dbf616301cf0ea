"""What a generating request contributes to the metrics."""

from __future__ import annotations

import time
from types import TracebackType

from baton.router.traces.record import Delivered
from baton.router.types import DEADLINE_EXCEEDED, RingError
from baton.telemetry.metrics import RouterMetrics
from baton.text.choice import Delta


class RequestMeter:
    """Times one request, as a context manager around its stream of deltas."""

    def __init__(
        self, metrics: RouterMetrics, endpoint: str, *, started: float, prompt_tokens: int, choices: int
    ) -> None:
        """``started`` is when the request arrived, by ``time.perf_counter``."""
        self._metrics = metrics
        self._endpoint = endpoint
        self._started = started
        self._prompt_tokens = prompt_tokens
        self._first = [0.0] * choices
        self._last = [0.0] * choices
        self._tokens = [0] * choices
        self._finished_ones = [False] * choices
        self._unfinished = choices

    def __enter__(self) -> RequestMeter:
        self._metrics.in_flight.labels(self._endpoint).inc()
        self._metrics.prompt_tokens.inc(self._prompt_tokens)
        return self

    def delivered(self, index: int, delta: Delta) -> None:
        """Choice ``index`` got more tokens."""
        metrics, now = self._metrics, time.perf_counter()
        if delta.token_ids:
            if self._tokens[index] == 0:
                self._first[index] = now
                metrics.time_to_first_token.observe(now - self._started)
            else:
                metrics.inter_token_latency.observe(now - self._last[index])
            self._last[index] = now
            self._tokens[index] += len(delta.token_ids)
            metrics.generated_tokens.inc(len(delta.token_ids))
        if delta.finish_reason is not None:
            self._finished(index, delta.finish_reason)

    def _finished(self, index: int, reason: str) -> None:
        self._finished_ones[index] = True
        self._unfinished -= 1
        self._metrics.choices.labels(self._endpoint, reason).inc()
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
        self._metrics.in_flight.labels(self._endpoint).dec()
        if self._unfinished:
            self._metrics.choices.labels(self._endpoint, _ended_by(error)).inc(self._unfinished)
        else:
            self._metrics.e2e_latency.observe(time.perf_counter() - self._started)


def _ended_by(error: BaseException | None) -> str:
    """A closed or cancelled generator raises outside of Exception: the client left."""
    if isinstance(error, RingError) and error.code == DEADLINE_EXCEEDED:
        return DEADLINE_EXCEEDED
    return "error" if isinstance(error, Exception) else "cancelled"
