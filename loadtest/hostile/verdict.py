"""The harm of an attack, against the bounds that are promised."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import msgspec

from loadtest.hostile.honest import Probe, Recorded, Request
from loadtest.hostile.vocabulary import Felt, Found, Watched

MAX_RSS = 400.0
"""Most memory of the router and its children, in MiB, at any time."""
MAX_RATIO = 1.5
"""The highest ratio of the 99th percentile of honest tenants' time between tokens to that of the calm
before."""
MAX_TURN_S = 0.05
"""The longest turn of the event loop by the router's own metric, in seconds; without waits for a processor,
if the metric excludes them."""
MAX_SILENCE_S = 0.25
"""The longest wait of a probe in seconds, where the router has no such metric: a probe waits for a core as
well, on both sides."""
_MAX = "baton_router_event_loop_longest_turn_seconds"
_MAX_OWN = "baton_router_event_loop_longest_own_turn_seconds"
_BUCKET = re.compile(r'baton_router_event_loop_lag_seconds_bucket\{le="([^"]+)"\}')


@dataclass(frozen=True)
class Phases:
    """The beginnings of the phases, on the system's monotonic clock."""

    calm: float
    attack: float
    end: float


class Turns(NamedTuple):
    """The longest turn of the event loop in seconds; NaN: there is no metric."""

    whole: float
    own: float
    """The longest turn without the router's waits for a processor."""


UNKNOWN = Turns(math.nan, math.nan)


class Row(msgspec.Struct, kw_only=True):
    """One attack and its outcome."""

    name: str
    finding: str
    aim: str
    worked: bool
    """Whether the attack reached its aim."""
    broken: list[str] = []
    """The bounds that did not hold."""
    skipped: str = ""
    """Why the attack was not tried."""
    found: Found
    watched: Watched | None = None
    felt: Felt | None = None

    @property
    def holds(self) -> bool:
        """Whether the aim was missed and no bound broken."""
        return not self.worked and not self.broken


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the least value that ``percent`` of all are not above; NaN if there are no values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def gaps(requests: Iterable[Request], since: float, until: float) -> list[float]:
    """Return the gaps between the pieces of streams, of the gaps that ended in that time. A stream that is
    silent at the end counts with its silence so far."""
    found = []
    for request in requests:
        times = request.times
        found += [b - a for a, b in pairwise(times) if since <= b < until]
        if times and request.ended_at is None and since <= times[-1] < until:
            found.append(until - times[-1])
    return found


def first_tokens(requests: Iterable[Request], since: float, until: float) -> list[float]:
    """Return the time to the first piece, for each stream that was asked for in that time."""
    asked = [request for request in requests if since <= request.sent_at < until]
    return [(request.times[0] if request.times else until) - request.sent_at for request in asked]


def longest(probes: Iterable[Probe], since: float, until: float) -> float:
    """Return the longest of the waits that reached into that time, on the connection that stays open."""
    took = [
        probe.took_s
        for probe in probes
        if not probe.fresh and probe.sent_at < until and probe.sent_at + probe.took_s >= since
    ]
    return max(took, default=math.nan)


def felt(recorded: Recorded, phases: Phases, turns: Turns = UNKNOWN) -> Felt:
    """Return the harm to honest clients, by their record."""
    asked = recorded.requests
    calm, meanwhile = (phases.calm, phases.attack), (phases.attack, phases.end)
    during = gaps(asked, *meanwhile)
    concerned = [each for each in asked if each.ended_at is None or each.ended_at >= phases.attack]
    failed = Counter(each.failed or "not ended" for each in concerned if each.ended_at is None)
    fresh = [probe for probe in recorded.probes if probe.fresh and probe.sent_at >= phases.attack]
    return Felt(
        itl_calm=percentile(gaps(asked, *calm), 99),
        itl=percentile(during, 99),
        itl_most=max(during, default=math.nan),
        ttft_calm=percentile(first_tokens(asked, *calm), 99),
        ttft=percentile(first_tokens(asked, *meanwhile), 99),
        requests=len(concerned),
        failed=dict(failed),
        silence_calm=longest(recorded.probes, *calm),
        silence=longest(recorded.probes, *meanwhile),
        probes_failed=sum(probe.failed for probe in fresh),
        turn=turns.whole,
        own_turn=turns.own,
    )


def broken(watched: Watched, felt: Felt, got: Mapping[str, int]) -> list[str]:
    """Return the bounds that did not hold, each with its figure. ``got``: the attacker's statuses."""
    found = []
    if "500" in got:
        found.append(f"{got['500']} answers of 500")
    if watched.whole_peak > MAX_RSS:
        found.append(f"RSS {watched.whole_peak:.0f} MiB")
    if not felt.ratio <= MAX_RATIO:
        found.append(f"ITL {felt.ratio:.1f}x")
    if felt.failed:
        found.append(f"{sum(felt.failed.values())} honest requests failed")
    if felt.probes_failed:
        found.append(f"{felt.probes_failed} probes got no answer")
    if math.isnan(felt.turn):
        if not felt.silence <= MAX_SILENCE_S:
            found.append(f"silent for {1e3 * felt.silence:.0f} ms")
    elif (turn := felt.turn if math.isnan(felt.own_turn) else felt.own_turn) > MAX_TURN_S:
        found.append(f"a turn of {1e3 * turn:.0f} ms")
    if watched.ended:
        found.append(f"{', '.join(watched.ended)} ended")
    return found


def max_turns(before: Mapping[str, float], after: Mapping[str, float]) -> Turns:
    """Return the longest turns between two pages of the router's metrics. The longest own turn of the last
    minute may be from before the first page, but no later one was longer."""
    whole = longest_turn(before, after)
    return Turns(whole, min(whole, after[_MAX_OWN]) if _MAX_OWN in after else math.nan)


def longest_turn(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """Return the longest turn of the event loop in seconds, between two pages of the router's metrics; NaN if
    there is no metric. It is the longest of the last minute where that grew, otherwise the bound of the
    bucket that it fell into."""
    if _MAX not in after:
        return math.nan
    if after[_MAX] > before.get(_MAX, 0.0):
        return after[_MAX]
    buckets = sorted(
        (float(found[1]), after[name] - before.get(name, 0.0))
        for name in after
        if (found := _BUCKET.fullmatch(name)) is not None
    )
    whole = buckets[-1][1] if buckets else 0.0
    return next((bound for bound, count in buckets if count >= whole), math.nan)


def verdict(rows: Sequence[Row], shown: Mapping[str, bool], *, expect_broken: bool) -> bool:
    """Return whether the outcome is as expected: every row holds, or, in the tree before, each attack that is
    ``shown`` to have worked does work. Skipped rows do not count."""
    tried = [row for row in rows if not row.skipped]
    if expect_broken:
        return all(row.worked for row in tried if shown[row.name])
    return all(row.holds for row in tried)
