"""Estimates, from measurements over time, of the load now and to come, and of what workers are like."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import NamedTuple

from baton.planner.forecast import Burstiness, Forecast
from baton.planner.goals import Times
from baton.planner.measured import Measured
from baton.planner.queueing import DecodeLoad, PrefillLoad
from baton.planner.sizing import Demand

LEARN_S = 150.0
"""The time after which new figures of workers count for two thirds, in seconds."""
JUMP = 3.0
"""A jump of the load, in standard deviations of a window's arrivals, were they independent."""
UNMET = 0.9
"""Attainment for which no headroom is kept for sudden bursts: the requests that a burst makes late are within
the rest."""
PER_SIGMA = 3.132
"""Headroom for answers, for each standard deviation of a normal distribution that the attainment is beyond
``UNMET``: 5 at 0.998."""
MAX_FOR_PROMPTS = 3.0
MAX_STRETCH = 3.0
RECOVER_S = 60.0
"""The time in which a backlog is to be gone, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEstimate:
    """What one worker is like, and one request there: the last known figure of each."""

    tokens_per_s: float = 0.0
    step_base_s: float = 0.0
    step_row_s: float = 0.0
    blocks: float = 0.0
    blocks_per_sequence: float = 0.0
    answer_tokens: float = 0.0

    def unknown(self) -> str:
        """Say in words what was never measured; empty if everything was."""
        if not self.tokens_per_s:
            return "no prefill worker has computed a prompt yet"
        if not self.step_base_s or not self.blocks or not self.blocks_per_sequence:
            return "no decode worker has told how fast it is yet"
        return "" if self.answer_tokens else "no answer has ended yet"


class Headroom(NamedTuple):
    """How far forecasts are taken to be too low, in standard deviations of the errors by which loads exceeded
    them."""

    prompts: float
    answers: float

    @classmethod
    def of(cls, attainment: float) -> Headroom:
        """Return the headroom for a share ``attainment`` of requests to meet the targets. The factors were
        found by trying (``python -m loadtest.planner``): bursts are rarer and greater than a normal
        distribution has them. Prompts that came too fast are computed a little later; answers that came too
        fast keep their blocks, which every request waits for."""
        sigmas = NormalDist().inv_cdf
        answers = max(0.0, PER_SIGMA * (sigmas(attainment) - sigmas(UNMET)))
        return cls(min(MAX_FOR_PROMPTS, answers), answers)


class DemandEstimate:
    """Estimates of the load and of a worker, updated with each measurement. Pure: callers pass the time."""

    def __init__(self, times: Times, headroom: Headroom) -> None:
        self._kept = headroom
        self._requests = Forecast(times.start_s, times.stale_s)
        self._prompts = Forecast(times.start_s, times.stale_s)
        self._answers = Forecast(times.start_s, times.stale_s)
        self._bursts = Burstiness()
        self._at_s: float | None = None
        self._stretch = self._crowding = 1.0
        self._last: Measured | None = None
        self.worker = WorkerEstimate()

    def see(self, seen: Measured) -> None:
        arrivals, decode = seen.arrivals, seen.decode
        learn = 1 - math.exp(-(seen.at_s - self._at_s) / LEARN_S) if self._at_s is not None else 1.0
        self._learn_worker(seen, learn)
        self._at_s, self._last = seen.at_s, seen
        answer_tokens_per_s = arrivals.requests_per_s * self.worker.answer_tokens
        number = max(1.0, self._requests.now * arrivals.window_s)
        surprise = JUMP / math.sqrt(number)
        self._requests.see(seen.at_s, arrivals.requests_per_s, self._requests.now * surprise)
        self._prompts.see(
            seen.at_s,
            arrivals.prompt_tokens_per_s,
            self._prompts.now * surprise * math.hypot(1, arrivals.prompt_spread),
        )
        self._answers.see(seen.at_s, answer_tokens_per_s, self._answers.now * surprise)
        self._bursts.see(seen.at_s, arrivals.requests_per_s, self._requests.now, arrivals.window_s)
        fit = self.worker.step_base_s + self.worker.step_row_s * decode.step_rows
        if decode.step_s and fit:
            self._stretch += learn * (_within(decode.step_s / fit) - self._stretch)
        if seen.fleet.ready.decode and self.worker.blocks_per_sequence:
            rows = replace(self._decode(self._answers.now), crowding=1.0).rows(seen.fleet.ready.decode)
            if 1.0 <= rows < math.inf:
                self._crowding += learn * (_within(decode.running / rows) - self._crowding)

    def _learn_worker(self, seen: Measured, learn: float) -> None:
        """Update the worker's figures. A figure that is missing now stays what it was."""
        known, decode = self.worker, seen.decode
        held = known.blocks_per_sequence
        if decode.running >= 1 and decode.blocks_held:
            each = decode.blocks_held / decode.running
            held = held + learn * (each - held) if held else each
        self.worker = WorkerEstimate(
            tokens_per_s=seen.prefill.tokens_per_s or known.tokens_per_s,
            step_base_s=decode.step_base_s or known.step_base_s,
            step_row_s=decode.step_row_s if decode.step_base_s else known.step_row_s,
            blocks=decode.blocks or known.blocks,
            blocks_per_sequence=held,
            answer_tokens=seen.arrivals.answer_tokens or known.answer_tokens,
        )

    @property
    def now(self) -> Demand:
        """The load that the ring bears now, backlog included."""
        return self._demand(self._requests.now, self._prompts.now, self._answers.now)

    @property
    def ahead(self) -> Demand:
        """The highest load expected until a pod that is asked for now would be ready, raised by the headroom
        for the latest forecast errors."""
        return self._demand(
            _peak(self._requests, self._kept.prompts),
            _peak(self._prompts, self._kept.prompts),
            _peak(self._answers, self._kept.answers),
        )

    @property
    def headroom(self) -> float:
        """The relative amount by which loads exceeded their forecasts lately: the worse of prompts and
        answers."""
        return max(self._prompts.error, self._answers.error)

    @property
    def burstiness(self) -> float:
        """The variance of arrivals over that of independent arrivals."""
        return self._bursts.ratio

    def _demand(self, requests: float, prompts: float, answers: float) -> Demand:
        assert self._last is not None
        prefill, arrivals = self._last.prefill, self._last.arrivals
        rate = self.worker.tokens_per_s
        usual = self._last.fleet.ready.prefill * rate * USUAL_WAIT_S
        backlog = max(0.0, prefill.waiting_tokens - usual) / RECOVER_S
        return Demand(
            prefill=PrefillLoad(
                requests_per_s=requests * (1 + backlog / prompts) if prompts else requests,
                tokens_per_s=prompts + backlog,
                spread=arrivals.prompt_spread,
                worker_tokens_per_s=rate,
            ),
            decode=self._decode(answers),
            before_s=prefill.before_s,
        )

    def _decode(self, tokens_per_s: float) -> DecodeLoad:
        worker = self.worker
        return DecodeLoad(
            tokens_per_s=tokens_per_s,
            base_s=worker.step_base_s,
            row_s=worker.step_row_s,
            rows_by_room=worker.blocks / worker.blocks_per_sequence,
            burstiness=self._bursts.ratio,
            stretch=self._stretch,
            crowding=self._crowding,
        )


USUAL_WAIT_S = 1.0
"""The longest wait of prompts that are no backlog, in seconds."""


def _within(ratio: float) -> float:
    return min(MAX_STRETCH, max(1.0, ratio))


def _peak(forecast: Forecast, headroom: float) -> float:
    return max(forecast.now, forecast.then * (1 + headroom * forecast.error))
