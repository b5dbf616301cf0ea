"""What an attack did to others, against the bounds that are promised."""

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

MOST_RSS = 400.0
"""MiB of the router and its children, at any time."""
MOST_RATIO = 1.5
"""Of the 99th percentile of honest tenants' time between tokens, to that of the calm before."""
MOST_TURN_S = 0.05
"""Of the event loop, by the router's own metric: without waits for a processor, if it tells them apart."""
MOST_SILENCE_S = 0.25
"""Of a probe, where the router has no such metric: a probe waits for a core as well, on both sides."""
_LONGEST = "baton_router_event_loop_longest_turn_seconds"
_LONGEST_OWN = "baton_router_event_loop_longest_own_turn_seconds"
_BUCKET = re.compile(r'baton_router_event_loop_lag_seconds_bucket\{le="([^"]+)"\}')


@dataclass(frozen=True)
class Phases:
    """When they began, on the system's monotonic clock."""

    calm: float
    attack: float
    end: float


class Turns(NamedTuple):
    """The longest turn of the event loop in seconds; NaN: nobody tells."""

    whole: float
    own: float
    """Without what the router waited for a processor."""


UNKNOWN = Turns(math.nan, math.nan)


class Row(msgspec.Struct, kw_only=True):
    """One attack and what became of it."""

    name: str
    finding: str
    aim: str
    worked: bool
    """It reached its aim."""
    broken: list[str] = []
    """Bounds that did not hold."""
    skipped: str = ""
    """Why it was not tried."""
    found: Found
    watched: Watched | None = None
    felt: Felt | None = None

    @property
    def holds(self) -> bool:
        """Nothing was reached, and nobody harmed."""
        return not self.worked and not self.broken


def percentile(values: Sequence[float], percent: float) -> float:
    """The least value that ``percent`` of all are not above; NaN of none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def gaps(requests: Iterable[Request], since: float, until: float) -> list[float]:
    """Between one piece of a stream and the next, of those that ended in that time. A stream that is silent
    at its end counts with as long as it has been."""
    found = []
    for request in requests:
        times = request.times
        found += [b - a for a, b in pairwise(times) if since <= b < until]
        if times and request.ended_at is None and since <= times[-1] < until:
            found.append(until - times[-1])
    return found


def first_tokens(requests: Iterable[Request], since: float, until: float) -> list[float]:
    """Until the first piece of each stream that was asked for in that time."""
    asked = [request for request in requests if since <= request.sent_at < until]
    return [(request.times[0] if request.times else until) - request.sent_at for request in asked]


def longest(probes: Iterable[Probe], since: float, until: float) -> float:
    """Of the waits that reached into that time, on the connection that stays open."""
    took = [
        probe.took_s
        for probe in probes
        if not probe.fresh and probe.sent_at < until and probe.sent_at + probe.took_s >= since
    ]
    return max(took, default=math.nan)


def felt(recorded: Recorded, phases: Phases, turns: Turns = UNKNOWN) -> Felt:
    """By what honest clients wrote down."""
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
    """The bounds that did not hold, each with its figure. ``got``: what the attacker did."""
    found = []
    if "500" in got:
        found.append(f"{got['500']} answers of 500")
    if watched.whole_peak > MOST_RSS:
        found.append(f"RSS {watched.whole_peak:.0f} MiB")
    if not felt.ratio <= MOST_RATIO:
        found.append(f"ITL {felt.ratio:.1f}x")
    if felt.failed:
        found.append(f"{sum(felt.failed.values())} honest requests failed")
    if felt.probes_failed:
        found.append(f"{felt.probes_failed} probes got no answer")
    if math.isnan(felt.turn):
        if not felt.silence <= MOST_SILENCE_S:
            found.append(f"silent for {1e3 * felt.silence:.0f} ms")
    elif (turn := felt.turn if math.isnan(felt.own_turn) else felt.own_turn) > MOST_TURN_S:
        found.append(f"a turn of {1e3 * turn:.0f} ms")
    if watched.ended:
        found.append(f"{', '.join(watched.ended)} ended")
    return found


def longest_turns(before: Mapping[str, float], after: Mapping[str, float]) -> Turns:
    """Between two pages of the router's metrics. The longest own turn of the last minute may be one from
    before the first page, but none since was longer."""
    whole = longest_turn(before, after)
    return Turns(whole, min(whole, after[_LONGEST_OWN]) if _LONGEST_OWN in after else math.nan)


def longest_turn(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """Of the event loop in seconds, between two pages of the router's metrics; NaN if it does not tell. The
    longest of the last minute where that grew; otherwise as exactly as the buckets of all turns tell."""
    if _LONGEST not in after:
        return math.nan
    if after[_LONGEST] > before.get(_LONGEST, 0.0):
        return after[_LONGEST]
    buckets = sorted(
        (float(found[1]), after[name] - before.get(name, 0.0))
        for name in after
        if (found := _BUCKET.fullmatch(name)) is not None
    )
    whole = buckets[-1][1] if buckets else 0.0
    return next((bound for bound, count in buckets if count >= whole), math.nan)


def verdict(rows: Sequence[Row], shown: Mapping[str, bool], *, expect_broken: bool) -> bool:
    """Whether all is as expected: everything holds, or, in the tree before, each attack that is ``shown`` to
    have worked does. Nothing is expected of what was skipped."""
    tried = [row for row in rows if not row.skipped]
    if expect_broken:
        return all(row.worked for row in tried if shown[row.name])
    return all(row.holds for row in tried)
