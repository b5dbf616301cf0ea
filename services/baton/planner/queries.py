"""Queries that make measurements of Prometheus' series."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass

from baton.planner.measured import Arrivals, DecodeState, Measured, MeasuredFleet, PrefillState
from baton.planner.prometheus import Prometheus

WINDOW_S = 60
"""The window of arrivals and steps, in seconds: four scrapes at 15 s."""
LENGTHS_S = 300
"""The window of lengths, shares and their divisors, in seconds: over fewer requests they would jump."""

KNOWN_S = 300
"""The time for which a router that was seen counts as known, in seconds. While a known router is missing
nothing is decided: it may have ended, or be scraped no more."""


@dataclass(frozen=True, slots=True)
class Queries:
    """Expressions that give one number each. ``selector``: label matchers that pick the ring's series."""

    selector: str

    def all(self) -> Mapping[str, str]:
        return {**self._arrivals(), **self._prefill(), **self._decode(), **self._trust()}

    def _arrivals(self) -> Mapping[str, str]:
        computed = "baton_engine_prompt_tokens_total"
        answers = "baton_request_generated_tokens"
        return {
            "requests": self._rate("baton_request_prompt_tokens_count", WINDOW_S),
            "prompts": self._rate("baton_prompt_tokens_total", WINDOW_S),
            "cached": f"{self._rate('baton_cached_prompt_tokens_total', LENGTHS_S)} / "
            f"{self._rate('baton_prompt_tokens_total', LENGTHS_S)}",
            "at_prefill": f"{self._rate(computed, LENGTHS_S, 'prefill')} / "
            f"{self._rate(computed, LENGTHS_S, '~prefill|decode')}",
            "answer_tokens": f"{self._rate(answers + '_sum', LENGTHS_S)} / "
            f"{self._rate(answers + '_count', LENGTHS_S)}",
        }

    def _prefill(self) -> Mapping[str, str]:
        stage, which = "baton_request_stage_seconds", f'{self.selector},role="router",stage="prepare"'
        return {
            "tokens_per_s": f"avg({self._of('baton_prefill_tokens_per_second', 'prefill')} > 0)",
            "waiting_tokens": self._sum("baton_waiting_prefill_tokens", "prefill"),
            "waiting_outside": self._sum("baton_admission_waiting_prompt_tokens"),
            "prepare": f"sum(rate({stage}_sum{{{which}}}[{LENGTHS_S}s])) "
            f"/ sum(rate({stage}_count{{{which}}}[{LENGTHS_S}s]))",
        }

    def _decode(self) -> Mapping[str, str]:
        blocks = self._of("baton_kv_blocks", "decode")
        steps = self._rate("baton_engine_steps_total", WINDOW_S, "decode")
        measured = f"{self._of('baton_decode_step_base_seconds', 'decode')} > 0"
        return {
            "step_base": f"avg({measured})",
            # Only of workers that have a base: the row's time may be 0, and is before the first step.
            "step_row": f"avg({self._of('baton_decode_step_row_seconds', 'decode')} and {measured})",
            "blocks": f"sum({blocks}) / {self._count('decode')}",
            "held": f'sum(baton_kv_blocks{{{self.selector},role="decode",state="held"}})',
            "running": self._sum("baton_sequences_running", "decode"),
            "waiting": self._sum("baton_sequences_waiting", "decode"),
            "homeless": self._sum("baton_requests_waiting"),
            "step": f"{self._rate('baton_engine_busy_seconds_total', WINDOW_S, 'decode')} / {steps}",
            "rows": f"{self._rate('baton_engine_step_sequences_total', WINDOW_S, 'decode')} / {steps}",
        }

    def _trust(self) -> Mapping[str, str]:
        """How many workers and routers report, and the age of the oldest report."""
        ages = [
            f"time() - min(timestamp({self._of(metric)}))"
            for metric in ("baton_sequences_running", "baton_requests_waiting")
        ]
        return {
            "told_prefill": self._count("prefill"),
            "told_decode": self._count("decode"),
            "age_of_workers": ages[0],
            "age_of_routers": ages[1],
            "told_routers": f"count({self._of('baton_router_tasks')})",
            "known_routers": f"count(last_over_time({self._of('baton_router_tasks')}[{KNOWN_S}s]))",
        }

    def lengths(self, metric: str) -> str:
        """The expression for a histogram's buckets, by ``le``."""
        return f"sum by (le) (increase({metric}_bucket{{{self.selector}}}[{LENGTHS_S}s]))"

    def _of(self, metric: str, role: str = "") -> str:
        operator = "=~" if role.startswith("~") else "="
        labels = f'{self.selector},role{operator}"{role.removeprefix("~")}"' if role else self.selector
        return f"{metric}{{{labels}}}"

    def _sum(self, metric: str, role: str = "") -> str:
        return f"sum({self._of(metric, role)})"

    def _count(self, role: str) -> str:
        return f"count({self._of('baton_sequences_running', role)})"

    def _rate(self, metric: str, seconds: int, role: str = "") -> str:
        return f"sum(rate({self._of(metric, role)}[{seconds}s]))"


class IncompleteError(Exception):
    """Prometheus answers, but does not know enough of the ring."""


NEEDED = ("requests", "prompts", "waiting_tokens", "blocks", "held", "running")
"""Figures without which nothing is known of the load. Means are missing where there was no load."""


async def measure(prometheus: Prometheus, queries: Queries, fleet: MeasuredFleet, at_s: float) -> Measured:
    """Measure the ring once. Raises PrometheusError and IncompleteError."""
    asked = queries.all()
    answers = await asyncio.gather(*(prometheus.value(each) for each in asked.values()))
    found = {name: value for name, value in zip(asked, answers, strict=True) if value is not None}
    _complete(found, fleet)
    histograms = ("baton_request_prompt_tokens", "baton_request_generated_tokens")
    series = await asyncio.gather(*(prometheus.series(queries.lengths(name)) for name in histograms))
    prompts, generated = ({labels["le"]: count for labels, count in each} for each in series)
    return _measured(found, spread(prompts), spread(generated), fleet, at_s)


def _complete(found: Mapping[str, float], fleet: MeasuredFleet) -> None:
    lacking = [name for name in NEEDED if name not in found]
    if lacking:
        raise IncompleteError(f"Prometheus has nothing of {', '.join(lacking)}")
    told, known = found.get("told_routers", 0.0), found.get("known_routers", 0.0)
    if told < known:  # the rates lack the requests of the missing routers
        raise IncompleteError(f"Prometheus has figures of {told:.0f} routers, and lately of {known:.0f}")
    for role, ready in (("prefill", fleet.ready.prefill), ("decode", fleet.ready.decode)):
        told = found.get(f"told_{role}", 0.0)
        if told * 2 < ready:
            raise IncompleteError(
                f"Prometheus has figures of {told:.0f} {role} workers, and {ready} are ready"
            )


def _measured(
    found: Mapping[str, float], prompt_spread: float, answer_spread: float, fleet: MeasuredFleet, at_s: float
) -> Measured:
    def of(name: str, otherwise: float = 0.0) -> float:
        return max(0.0, found.get(name, otherwise))

    computed = (1 - min(1.0, of("cached"))) * of("at_prefill", 1.0)
    return Measured(
        at_s=at_s,
        age_s=max(of("age_of_workers", math.inf), of("age_of_routers", math.inf)),
        arrivals=Arrivals(
            window_s=WINDOW_S,
            requests_per_s=of("requests"),
            prompt_tokens_per_s=of("prompts") * computed,
            prompt_spread=prompt_spread,
            answer_tokens=of("answer_tokens"),
            answer_spread=answer_spread,
        ),
        prefill=PrefillState(
            tokens_per_s=of("tokens_per_s"),
            waiting_tokens=of("waiting_tokens") + of("waiting_outside"),
            before_s=of("prepare"),
        ),
        decode=DecodeState(
            step_base_s=of("step_base"),
            step_row_s=of("step_row"),
            blocks=of("blocks"),
            blocks_held=of("held"),
            running=of("running") + of("waiting") + of("homeless"),
            step_s=of("step"),
            step_rows=of("rows"),
        ),
        fleet=fleet,
    )


def spread(buckets: Mapping[str, float]) -> float:
    """Return the standard deviation over the mean of a histogram's values, taken to be log-uniform within
    each bucket. 0 for an empty histogram."""
    bounds = sorted((float(le), count) for le, count in buckets.items())
    total = mean = square = 0.0
    low, below = 0.0, 0.0
    for high, count in bounds:
        inside, below = max(0.0, count - below), max(below, count)
        if inside:
            first, second = _moments(low, high)
            total, mean, square = total + inside, mean + inside * first, square + inside * second
        low = high
    if not total or not mean:
        return 0.0
    mean, square = mean / total, square / total
    return math.sqrt(max(0.0, square - mean * mean)) / mean


def _moments(low: float, high: float) -> tuple[float, float]:
    """Return the means of x and of x squared for x log-uniform between two bounds."""
    if math.isinf(high):
        return low, low * low
    low = max(low, high / 4, 1e-9)
    if low >= high:
        return high, high * high
    width = math.log(high / low)
    return (high - low) / width, (high * high - low * low) / (2 * width)
