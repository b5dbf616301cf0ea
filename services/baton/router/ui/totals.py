"""What a router has counted since it started, over all of its processes, for the live page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from prometheus_client import Counter
from prometheus_client.registry import Collector

from baton.telemetry.admission import AdmissionMetrics
from baton.telemetry.metrics import RouterMetrics
from baton.telemetry.pairs import PairCounts, WorkerPair
from baton.telemetry.ring import RingSource

Key = TypeVar("Key", str, float)
Buckets = tuple[tuple[float, float], ...]
"""(upper bound, observations up to the bound), ascending; the last bound is infinite."""


class Observed(NamedTuple):
    """The observations of one stage: their number, and the sum of their seconds."""

    number: float = 0.0
    seconds: float = 0.0


@dataclass(slots=True)
class TenantTotals:
    """One tenant: its requests at this moment, and its counts."""

    waiting: float = 0.0
    waiting_prompt_tokens: float = 0.0
    open: float = 0.0
    tokens: float = 0.0
    """The tokens of requests that have ended, prompts included."""
    refused: float = 0.0
    """The requests refused at once, or after waiting."""


@dataclass(slots=True)
class PairTotals:
    """One pair of workers: its handoffs so far, and those that are under way."""

    prefill: str
    decode: str
    open: int = 0
    counts: PairCounts = field(default_factory=PairCounts)


@dataclass(frozen=True, slots=True)
class Totals:
    """The counts since the router started, and the requests in flight and waiting, at one moment."""

    in_flight: float
    waiting: float
    prompt_tokens: float
    generated_tokens: float
    answers: float
    """The answers that have ended in any way."""
    ttft: Buckets
    itl: Buckets
    stages: dict[str, Observed]
    """The router's stages of requests."""
    slo: dict[str, float]
    """The requests by the target missed and the cause: ``none``, ``ttft prefill_queue``, …"""
    tenants: dict[str, TenantTotals]
    pairs: list[PairTotals]
    """The pairs of workers that are known now."""
    handoffs: PairCounts
    """All handoffs, also those of workers that are gone."""


def totals_of(metrics: RouterMetrics, admission: AdmissionMetrics, rings: Sequence[RingSource]) -> Totals:
    """Return the totals of this process."""
    return Totals(
        in_flight=value_of(metrics.in_flight),
        waiting=admission.waiting,
        prompt_tokens=value_of(metrics.prompt_tokens),
        generated_tokens=value_of(metrics.generated_tokens),
        answers=value_of(metrics.choices),
        ttft=buckets_of(metrics.time_to_first_token),
        itl=buckets_of(metrics.inter_token_latency),
        stages={stage: Observed(*told) for stage, told in metrics.stages.totals("router").items()},
        slo={" ".join(filter(None, key)): count for key, count in metrics.goodput.counts().items()},
        tenants=_tenants(admission),
        pairs=[pair for ring in rings for pair in _pairs(ring)],
        handoffs=_together(ring.handoffs().total for ring in rings),
    )


def _tenants(admission: AdmissionMetrics) -> dict[str, TenantTotals]:
    found: dict[str, TenantTotals] = {}
    for tenant, tokens in _by_tenant(admission.admitted_tokens).items():
        found.setdefault(tenant, TenantTotals()).tokens = tokens
    for tenant, refused in _by_tenant(admission.refused).items():
        found.setdefault(tenant, TenantTotals()).refused = refused
    for view in admission.tenants():
        mine = found.setdefault(view.tenant, TenantTotals())
        mine.waiting, mine.waiting_prompt_tokens = view.waiting, view.waiting_prompt_tokens
        mine.open = view.open_requests
    return found


def _by_tenant(counter: Counter) -> dict[str, float]:
    found: dict[str, float] = {}
    for sample in (sample for family in counter.collect() for sample in family.samples):
        if sample.name.endswith("_total"):
            tenant = sample.labels["tenant"]
            found[tenant] = found.get(tenant, 0.0) + sample.value
    return found


def _pairs(ring: RingSource) -> list[PairTotals]:
    counted, open_handoffs = ring.handoffs().counts, ring.open_handoffs()
    known = {view.address for view in ring.views()}
    return [
        PairTotals(*pair, open_handoffs.get(pair, 0), counted.get(pair, PairCounts()))
        for pair in dict.fromkeys([*counted, *open_handoffs])
        if known.issuperset(pair)
    ]


def _together(counts: Iterable[PairCounts]) -> PairCounts:
    """Add up counts, in an object of their own: those that are given go on counting."""
    total = PairCounts()
    for each in counts:
        total.add(each)
    return total


def summed(totals: Sequence[Totals]) -> Totals:
    """Return the totals of several processes together."""
    return Totals(
        in_flight=sum(each.in_flight for each in totals),
        waiting=sum(each.waiting for each in totals),
        prompt_tokens=sum(each.prompt_tokens for each in totals),
        generated_tokens=sum(each.generated_tokens for each in totals),
        answers=sum(each.answers for each in totals),
        ttft=_added(each.ttft for each in totals),
        itl=_added(each.itl for each in totals),
        stages=_stages(totals),
        slo=dict(_added(each.slo.items() for each in totals)),
        tenants=_tenants_of_all(totals),
        pairs=_pairs_of_all(totals),
        handoffs=_together(each.handoffs for each in totals),
    )


def _stages(totals: Sequence[Totals]) -> dict[str, Observed]:
    found: dict[str, Observed] = {}
    for stage, told in (item for each in totals for item in each.stages.items()):
        mine = found.get(stage, Observed())
        found[stage] = Observed(mine.number + told.number, mine.seconds + told.seconds)
    return found


def _tenants_of_all(totals: Sequence[Totals]) -> dict[str, TenantTotals]:
    found: dict[str, TenantTotals] = {}
    for tenant, told in (item for each in totals for item in each.tenants.items()):
        mine = found.setdefault(tenant, TenantTotals())
        mine.waiting += told.waiting
        mine.waiting_prompt_tokens += told.waiting_prompt_tokens
        mine.open += told.open
        mine.tokens += told.tokens
        mine.refused += told.refused
    return found


def _pairs_of_all(totals: Sequence[Totals]) -> list[PairTotals]:
    """Add up the pairs, in objects of their own: those of ``totals`` go on counting."""
    found: dict[WorkerPair, PairTotals] = {}
    for told in (pair for each in totals for pair in each.pairs):
        mine = found.setdefault(WorkerPair(told.prefill, told.decode), PairTotals(told.prefill, told.decode))
        mine.open += told.open
        mine.counts.add(told.counts)
    return list(found.values())


def _added(several: Iterable[Iterable[tuple[Key, float]]]) -> tuple[tuple[Key, float], ...]:
    found: dict[Key, float] = {}
    for items in several:
        for key, count in items:
            found[key] = found.get(key, 0.0) + count
    return tuple(sorted(found.items()))


def value_of(metric: Collector) -> float:
    """Return the sum of a metric over all labels."""
    samples = (sample for family in metric.collect() for sample in family.samples)
    return sum(sample.value for sample in samples if not sample.name.endswith("_created"))


def buckets_of(histogram: Collector) -> Buckets:
    """Return the sum of a histogram's buckets over all labels."""
    samples = (sample for family in histogram.collect() for sample in family.samples)
    return _added(
        [(float(sample.labels["le"]), sample.value)] for sample in samples if sample.name.endswith("_bucket")
    )
