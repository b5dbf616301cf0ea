"""The last minutes of a router for its live page: a point every two seconds, made from the metrics."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from heapq import nlargest, nsmallest
from operator import itemgetter
from typing import NoReturn

import msgspec
import orjson

from baton.router.processes.siblings import Siblings
from baton.router.ui.changes import Changes
from baton.router.ui.totals import Buckets, Observed, PairTotals, TenantTotals, Totals, summed, totals_of
from baton.telemetry.admission import AdmissionMetrics
from baton.telemetry.metrics import RouterMetrics
from baton.telemetry.pairs import PairCounts
from baton.telemetry.ring import RingSource, WorkerView

EVERY_S = 2.0
FRESH_S = 0.5
"""The time for which one document answers all pages."""
MAX_POINTS = 150
"""Most points that are kept: five minutes."""
WINDOW = 5
"""The points over which the quantiles and rates of a point are computed: ten seconds."""
MAX_PAIRS = 256
"""Most pairs of workers in a document, those with the most bytes lately."""
MAX_TENANTS = 256
"""Most tenants in a document, and in a point, those with the most requests waiting."""

_WORKER_FIELDS = tuple(each.name for each in fields(WorkerView))
TOTALS = "totals"
"""The name of the question that the processes of a router ask each other."""


@dataclass(frozen=True, slots=True)
class Point:
    """One point: rates per second, and durations in milliseconds, None if nothing was observed."""

    number: int
    at: float
    prompt_rate: float
    token_rate: float
    answer_rate: float
    ttft_p50: float | None
    ttft_p99: float | None
    itl_p50: float | None
    itl_p99: float | None
    in_flight: float
    waiting: float
    stages: dict[str, float | None]
    """The mean of each stage up to the first token."""
    handoff: dict[str, float | None]
    """The mean of each part from the first token's step to the second token's."""
    itl: list[float]
    """The gaps between tokens since the point before, by bucket."""
    slo: dict[str, float]
    """The requests per second by the target missed: none, ttft, itl, error."""
    tenants: dict[str, float]
    """The requests that wait, by tenant; only those of tenants that have any, of `MAX_TENANTS` at most."""


class History:
    """The history of all processes of a router together. Event loop's thread only."""

    def __init__(
        self,
        metrics: RouterMetrics,
        rings: Sequence[RingSource],
        admission: AdmissionMetrics,
        siblings: Siblings | None = None,
    ) -> None:
        self._metrics = metrics
        self._rings = rings
        self._admission = admission
        self._siblings = siblings or Siblings()
        self._siblings.on(TOTALS, self._tell_totals)
        self._others: dict[int, Totals] = {}
        self._changes = Changes()
        mine = summed([self._mine()])
        self._seen: deque[tuple[float, Totals]] = deque([(time.monotonic(), mine)], maxlen=WINDOW + 1)
        self._points: deque[tuple[Point, orjson.Fragment]] = deque(maxlen=MAX_POINTS)
        self._number = 0
        self._made = -FRESH_S
        self._making = asyncio.Lock()
        self._told: dict[str, object] = {}
        """The last document without its points."""
        self._told_of = self._made
        """The time of the totals in that document."""
        self._totals = mine
        self._packed = (-FRESH_S, b"")
        """The last answer to the other processes, and its time."""

    async def run(self) -> NoReturn:
        """Add points for as long as the router lives."""
        while True:
            await asyncio.sleep(EVERY_S)
            totals = await self.totals()
            self.tick(time.monotonic(), totals)

    def tick(self, now: float, totals: Totals) -> None:
        """Add a point."""
        then, before = self._seen[0]
        _, last = self._seen[-1]
        self._seen.append((now, totals))
        self._number = max(self._number + 1, int(now / EVERY_S))  # alike in all processes of the router
        point = _point(self._number, now, max(now - then, 1e-9), before, last, totals)
        self._points.append((point, orjson.Fragment(orjson.dumps(point))))
        self._changes.look((view for _, view in self._views()), now)

    async def document(self, after: int = 0) -> bytes:
        """Return all that the page shows an operator, as JSON, with the points of higher numbers than
        ``after``."""
        await self._refresh()
        if self._told_of != self._made:
            self._told, self._told_of = self._tell(self._made, self._totals), self._made
        points = [encoded for point, encoded in self._points if point.number > after]
        return orjson.dumps({**self._told, "number": self._number, "now": time.monotonic(), "points": points})

    async def document_of(self, tenant: str) -> bytes:
        """Return what the page shows a client that is no operator, as JSON: its tenant's share of the
        queue."""
        await self._refresh()
        now, totals = self._made, self._totals
        return orjson.dumps(
            {
                "operator": False,
                "tenants": [self._tenant(now, tenant, totals.tenants.get(tenant, TenantTotals()))],
                "every_s": EVERY_S,
            }
        )

    async def _refresh(self) -> None:
        """Take new totals, unless the last ones are fresh: they serve all pages."""
        async with self._making:
            if time.monotonic() - self._made < FRESH_S:
                return
            self._totals = await self.totals()
            self._made = time.monotonic()

    def _tell(self, now: float, totals: Totals) -> dict[str, object]:
        views = self._views()
        self._changes.look((view for _, view in views), now)
        pairs, left_out = self._pairs(now, totals, {view.address for _, view in views})
        return {
            "operator": True,
            "in_flight": totals.in_flight,
            "waiting": totals.waiting,
            "prompt_tokens": totals.prompt_tokens,
            "generated_tokens": totals.generated_tokens,
            "answers": totals.answers,
            "stages": {stage: told._asdict() for stage, told in totals.stages.items()},
            "handoff": {part: told._asdict() for part, told in _handoff(totals).items()},
            "itl_bounds": [bound for bound, _ in totals.itl[:-1]],
            "targets": asdict(self._metrics.goodput.targets),
            "slo": totals.slo,
            "tenants": [self._tenant(now, name, told) for name, told in self._tenants(totals)],
            "tenants_left_out": max(0, len(totals.tenants) - MAX_TENANTS),
            "workers": [self._worker(model, view) for model, view in views],
            "pairs": pairs,
            "pairs_left_out": left_out,
            "changes": [asdict(change) for change in reversed(self._changes.latest)],
            "every_s": EVERY_S,
            "most_points": MAX_POINTS,
        }

    def _worker(self, model: str, view: WorkerView) -> dict[str, object]:
        fields_told = {name: getattr(view, name) for name in _WORKER_FIELDS}
        return fields_told | {"model": model, "last_role": self._changes.role_of(view)}

    def _views(self) -> list[tuple[str, WorkerView]]:
        """Return the workers with their models, by model and address: a worker keeps its place when its role
        changes."""
        found = [(ring.model, view) for ring in self._rings for view in ring.views()]
        return sorted(found, key=lambda each: (each[0], each[1].address))

    def _since(self, now: float) -> tuple[float, Totals]:
        """Return the seconds for which rates are computed, and the totals at their beginning."""
        then, before = self._seen[0]
        return max(now - then, 1e-9), before

    def _pairs(self, now: float, totals: Totals, known: set[str]) -> tuple[list[dict[str, object]], int]:
        """Return the pairs of known workers, the busiest first, and the number of those that are left out.
        Rates are those of the last ten seconds."""
        seconds, before = self._since(now)
        then = {(pair.prefill, pair.decode): pair.counts for pair in before.pairs}
        nothing = PairCounts()
        found = []
        for pair in totals.pairs:
            if pair.prefill in known and pair.decode in known:
                counts = then.get((pair.prefill, pair.decode), nothing)
                found.append((counts.bytes - pair.counts.bytes, pair.prefill, pair.decode, counts, pair))
        found.sort(key=itemgetter(0, 1, 2))
        told = [_pair_told(pair, counts, seconds) for _, _, _, counts, pair in found[:MAX_PAIRS]]
        return told, len(found) - len(told)

    def _tenants(self, totals: Totals) -> list[tuple[str, TenantTotals]]:
        """Return the tenants that are told, those that wait first, then those with the most tokens lately."""
        before = self._seen[0][1].tenants

        def place(tenant: tuple[str, TenantTotals]) -> tuple[float, float, str]:
            name, told = tenant
            return -told.waiting, _tokens_of(before, name) - told.tokens, name

        return nsmallest(MAX_TENANTS, totals.tenants.items(), key=place)

    def _tenant(self, now: float, name: str, told: TenantTotals) -> dict[str, object]:
        seconds, before = self._since(now)
        rate = _risen(told.tokens, _tokens_of(before.tenants, name)) / seconds
        return {"tenant": name, **asdict(told), "token_rate": rate}

    async def totals(self) -> Totals:
        """Return the totals of all processes."""
        for index, told in (await self._siblings.ask(TOTALS)).items():
            self._others[index] = msgspec.msgpack.decode(told, type=Totals)
        return summed([self._mine(), *self._others.values()])  # of a silent process, its last answer

    async def _tell_totals(self, _: bytes) -> bytes:
        """Return the totals of this process; one answer serves all others for a while."""
        made, packed = self._packed
        now = time.monotonic()
        if now - made >= FRESH_S:
            packed = msgspec.msgpack.encode(self._mine())
            self._packed = now, packed
        return packed

    def _mine(self) -> Totals:
        return totals_of(self._metrics, self._admission, self._rings)


def _pair_told(pair: PairTotals, before: PairCounts, seconds: float) -> dict[str, object]:
    counts = pair.counts
    return {
        "prefill": pair.prefill,
        "decode": pair.decode,
        "open": pair.open,
        "handoffs": counts.handoffs,
        "bytes": counts.bytes,
        "bytes_per_s": _risen(counts.bytes, before.bytes) / seconds,
        "handoffs_per_s": _risen(counts.handoffs, before.handoffs) / seconds,
        "transfer_ms": _mean_ms(
            Observed(before.handoffs, before.transfer_s), Observed(counts.handoffs, counts.transfer_s)
        ),
    }


def _point(number: int, now: float, seconds: float, before: Totals, last: Totals, totals: Totals) -> Point:
    """Return a point of the ``seconds`` since ``before``; ``last`` are the totals of the point before."""
    handoff_before = _handoff(before)
    return Point(
        number=number,
        at=now,
        prompt_rate=_risen(totals.prompt_tokens, before.prompt_tokens) / seconds,
        token_rate=_risen(totals.generated_tokens, before.generated_tokens) / seconds,
        answer_rate=_risen(totals.answers, before.answers) / seconds,
        ttft_p50=_ms(quantile(0.5, before.ttft, totals.ttft)),
        ttft_p99=_ms(quantile(0.99, before.ttft, totals.ttft)),
        itl_p50=_ms(quantile(0.5, before.itl, totals.itl)),
        itl_p99=_ms(quantile(0.99, before.itl, totals.itl)),
        in_flight=totals.in_flight,
        waiting=totals.waiting,
        stages={
            stage: _mean_ms(before.stages.get(stage, Observed()), told)
            for stage, told in totals.stages.items()
        },
        handoff={part: _mean_ms(handoff_before[part], told) for part, told in _handoff(totals).items()},
        itl=[count for _, count in observed(last.itl, totals.itl)],
        slo=_missed(before, totals, seconds),
        tenants=_waiting(totals.tenants),
    )


def _tokens_of(tenants: Mapping[str, TenantTotals], name: str) -> float:
    told = tenants.get(name)
    return 0.0 if told is None else told.tokens


def _waiting(tenants: Mapping[str, TenantTotals]) -> dict[str, float]:
    waiting = ((told.waiting, name) for name, told in tenants.items() if told.waiting)
    return {name: many for many, name in nlargest(MAX_TENANTS, waiting)}


def _handoff(totals: Totals) -> dict[str, Observed]:
    """Return the parts from the end of a prompt's computation to the second token, over all pairs."""
    counts = totals.handoffs
    return {
        "flush": Observed(counts.handoffs, counts.flush_s),
        "commit": Observed(counts.handoffs, counts.commit_s),
        "queue": Observed(counts.joined, counts.queue_s),
        "first_step": Observed(counts.joined, counts.step_s),
    }


def _missed(before: Totals, totals: Totals, seconds: float) -> dict[str, float]:
    found = dict.fromkeys(("none", "ttft", "itl", "error"), 0.0) if totals.slo else {}
    for key, count in totals.slo.items():
        found[key.split()[0]] += _risen(count, before.slo.get(key, 0.0)) / seconds
    return found


def _risen(now: float, before: float) -> float:
    """Return by how much a count has risen. A process that replaces a dead one begins at 0, so that the sum
    may shrink."""
    return max(0.0, now - before)


def _mean_ms(before: Observed, after: Observed) -> float | None:
    count = after.number - before.number
    return _ms(_risen(after.seconds, before.seconds) / count) if count > 0 else None


def observed(before: Buckets, after: Buckets) -> list[tuple[float, float]]:
    """Return the observations between ``before`` and ``after``: for each upper bound those up to it and above
    the bound before."""
    then, counts, below = dict(before), [], 0.0  # empty for a histogram with labels before its first one
    for bound, count in after:
        up_to = _risen(count, then.get(bound, 0.0))
        counts.append((bound, max(0.0, up_to - below)))
        below = max(below, up_to)
    return counts


def quantile(share: float, before: Buckets, after: Buckets) -> float | None:
    """Return a quantile of the observations between ``before`` and ``after``, None without observations. The
    estimate is that of Prometheus: evenly spread within a bucket, and the highest finite bound beyond it."""
    counts = observed(before, after)
    total = sum(count for _, count in counts)
    if total <= 0:
        return None
    rank, lower, below = share * total, 0.0, 0.0
    for bound, inside in counts:
        if below + inside >= rank:
            if bound == float("inf"):
                return lower
            return lower + (bound - lower) * ((rank - below) / inside if inside else 1.0)
        lower, below = bound, below + inside
    return lower


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)
