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


def waits(probes: Iterable[Probe], since: float, until: float) -> list[float]:
    """Return the waits of the probes that were sent in that time, on the connection that stays open."""
    return [probe.took_s for probe in probes if not probe.fresh and since <= probe.sent_at < until]


def longest(probes: Iterable[Probe], since: float, until: float) -> float:
    """Return the longest of the waits that reached into that time, on the connection that stays open."""
    took = [
        probe.took_s
        for probe in probes
        if not probe.fresh and probe.sent_at < until and probe.sent_at + probe.took_s >= since
    ]
    return max(took, default=math.nan)


class Samples(msgspec.Struct, kw_only=True):
    """The times of honest clients, in seconds, before the attack and from its beginning on."""

    itl_calm: list[float] = []
    itl: list[float] = []
    ttft_calm: list[float] = []
    ttft: list[float] = []
    probe_calm: list[float] = []
    """The waits for the answers to probes on the connection that stays open."""
    probe: list[float] = []

    def add(self, others: Samples) -> None:
        """Add the times of another round."""
        self.itl_calm += others.itl_calm
        self.itl += others.itl
        self.ttft_calm += others.ttft_calm
        self.ttft += others.ttft
        self.probe_calm += others.probe_calm
        self.probe += others.probe


def samples(recorded: Recorded, phases: Phases) -> Samples:
    """Return the times in ``recorded``."""
    asked = recorded.requests
    calm, meanwhile = (phases.calm, phases.attack), (phases.attack, phases.end)
    return Samples(
        itl_calm=gaps(asked, *calm),
        itl=gaps(asked, *meanwhile),
        ttft_calm=first_tokens(asked, *calm),
        ttft=first_tokens(asked, *meanwhile),
        probe_calm=waits(recorded.probes, *calm),
        probe=waits(recorded.probes, *meanwhile),
    )


def felt(recorded: Recorded, phases: Phases, turns: Turns = UNKNOWN) -> Felt:
    """Return the harm to honest clients, by their record."""
    calm, meanwhile = (phases.calm, phases.attack), (phases.attack, phases.end)
    concerned = [
        each for each in recorded.requests if each.ended_at is None or each.ended_at >= phases.attack
    ]
    failed = Counter(each.failed or "not ended" for each in concerned if each.ended_at is None)
    fresh = [probe for probe in recorded.probes if probe.fresh and probe.sent_at >= phases.attack]
    harm = Felt(
        requests=len(concerned),
        failed=dict(failed),
        silence_calm=longest(recorded.probes, *calm),
        silence=longest(recorded.probes, *meanwhile),
        probes_failed=sum(probe.failed for probe in fresh),
        turn=turns.whole,
        own_turn=turns.own,
    )
    return with_times(harm, samples(recorded, phases))


def with_times(harm: Felt, times: Samples) -> Felt:
    """Return ``harm`` with the percentiles of ``times``."""
    return msgspec.structs.replace(
        harm,
        itl_calm=percentile(times.itl_calm, 99),
        itl=percentile(times.itl, 99),
        itl_most=max(times.itl, default=math.nan),
        ttft_calm=percentile(times.ttft_calm, 99),
        ttft=percentile(times.ttft, 99),
        probe_calm=percentile(times.probe_calm, 99),
        probe=percentile(times.probe, 99),
    )


def all_felt(rounds: Sequence[Felt], times: Samples) -> Felt:
    """Return the harm of all rounds together: percentiles over ``times``, the times of all; the longest
    silence and turn; the sum of what failed."""
    failed: Counter[str] = Counter()
    for each in rounds:
        failed.update(each.failed)
    harm = msgspec.structs.replace(
        rounds[0],
        requests=sum(each.requests for each in rounds),
        failed=dict(failed),
        silence_calm=_most(each.silence_calm for each in rounds),
        silence=_most(each.silence for each in rounds),
        probes_failed=sum(each.probes_failed for each in rounds),
        turn=_most(each.turn for each in rounds),
        own_turn=_most(each.own_turn for each in rounds),
    )
    return with_times(harm, times)


def all_watched(rounds: Sequence[Watched]) -> Watched:
    """Return the most of all rounds."""
    most = {
        name: max(getattr(each, name) for each in rounds)
        for name in Watched.__struct_fields__
        if name != "ended"
    }
    return Watched(**most, ended=sorted({name for each in rounds for name in each.ended}))


def _most(values: Iterable[float]) -> float:
    return max((value for value in values if not math.isnan(value)), default=math.nan)


def broken(
    watched: Watched, felt: Felt, got: Mapping[str, int], *, loads: bool = False, beside: bool = False
) -> list[str]:
    """Return the bounds that did not hold, each with its figure. ``got``: the attacker's statuses. ``loads``:
    see `Attack`. ``beside``: whether the machine has so much other work that the router's turns, too, are
    judged by the calm beside the same work."""
    found = []
    if "500" in got:
        found.append(f"{got['500']} answers of 500")
    if watched.whole_peak > MAX_RSS:
        found.append(f"RSS {watched.whole_peak:.0f} MiB")
    if not loads and not felt.ratio <= MAX_RATIO:
        found.append(f"ITL {felt.ratio:.1f}x")
    if felt.failed:
        found.append(f"{sum(felt.failed.values())} honest requests failed")
    if felt.probes_failed:
        found.append(f"{felt.probes_failed} probes got no answer")
    found += _slow_probes(felt) if beside else _long_turns(felt)
    if watched.ended:
        found.append(f"{', '.join(watched.ended)} ended")
    return found


def _slow_probes(felt: Felt) -> list[str]:
    if felt.probe <= max(MAX_TURN_S, MAX_RATIO * felt.probe_calm):
        return []
    return [f"probes waited {1e3 * felt.probe:.0f} ms, {1e3 * felt.probe_calm:.0f} ms in the calm"]


def _long_turns(felt: Felt) -> list[str]:
    if math.isnan(felt.turn):
        return [] if felt.silence <= MAX_SILENCE_S else [f"silent for {1e3 * felt.silence:.0f} ms"]
    turn = felt.turn if math.isnan(felt.own_turn) else felt.own_turn
    return [f"a turn of {1e3 * turn:.0f} ms"] if turn > MAX_TURN_S else []


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
