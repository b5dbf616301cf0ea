"""The workers that scalers with knowledge of the future would need: how much there is to gain at all.

    python -m loadtest.planner.oracle [--seeds 3] [--hours 24]

Both scalers size with the planner's own estimates. ``Told`` knows every request before it comes; ``Usual``
knows the usual rates of both kinds, but no burst before it begins. Neither switches roles. These are not
bounds in the strict sense: better estimates would need a little less.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console

from baton.planner.goals import LatencyTargets, PlanBounds
from baton.planner.measured import Counts
from baton.planner.queueing import DecodeLoad, PrefillLoad
from baton.planner.sizing import Demand, ServiceEstimate, smallest
from loadtest.conditions import conditions
from loadtest.planner.__main__ import FIRST, ITL_S, MOST, ROOM, TTFT_S, Mean, setting, table
from loadtest.planner.cluster import Cluster
from loadtest.planner.run import Outcome, simulate
from loadtest.planner.scalers import SYNC_S, Scaler
from loadtest.planner.trace import KINDS, Request, day

START_S, SETTLE_S = 120.0, 180.0
STEP_S, ROW_S = 0.142, 0.0001
"""The step's base and row time of a well filled decode worker."""
PROMPT_S = 1.0
"""The time for which a request holds room before its first token."""
TOLD_ATTAINMENT = 0.9
"""The attainment that sizes are made for: with it as many requests meet the targets as with the planner's
defaults."""
USUALS = ((0.95, 1.0), (0.95, 1.3), (0.97, 1.4), (0.99, 1.4), (0.99, 1.6), (0.99, 1.8))
"""Attainments to size for, and how many times the usual rates always have room; the cheapest first."""
MARGIN = 1.1
CLIPPED = 0.98
"""The share of a kind's mean prompt that is left when its longest prompts are clipped."""


class Sizes:
    """The workers for given rates of each kind, in requests/s."""

    def __init__(self, attainment: float) -> None:
        self._targets = LatencyTargets(ttft_s=TTFT_S, itl_s=ITL_S, attainment=attainment)
        self._bounds = PlanBounds(gpu_budget=2 * MOST, max_prefill=MOST, max_decode=MOST)
        self._known: dict[tuple[float, float], Counts] = {}

    def of(self, code: float, chat: float) -> Counts:
        rates = max(0.05, round(code, 1)), max(0.05, round(chat, 1))
        if rates not in self._known:
            estimate = ServiceEstimate(_demand(*rates), self._targets)
            self._known[rates] = smallest(estimate, self._targets, self._bounds).workers
        return self._known[rates]


def _demand(code: float, chat: float) -> Demand:
    rates = tuple(zip((code, chat), KINDS, strict=True))
    requests = code + chat
    prompts = CLIPPED * sum(rate * kind.prompt for rate, kind in rates)
    answers = sum(rate * kind.answer for rate, kind in rates)
    there = [rate * (kind.answer * STEP_S + PROMPT_S) for rate, kind in rates]
    held = sum(number * (kind.prompt + kind.answer) for number, kind in zip(there, KINDS, strict=True))
    profile = setting(START_S).profile
    prompt_s = profile.prefill_ms_per_1k / 1e6 + profile.step_base_ms / 1e3 / max(1.0, prompts / requests)
    decode = DecodeLoad(
        tokens_per_s=answers,
        base_s=STEP_S,
        row_s=ROW_S,
        rows_by_room=ROOM / (held / sum(there)),
        burstiness=1.0,
    )
    return Demand(
        prefill=PrefillLoad(
            requests_per_s=requests, tokens_per_s=prompts, spread=0.85, worker_tokens_per_s=1 / prompt_s
        ),
        decode=replace(decode, crowding=sum(there) / (answers * STEP_S)),
        before_s=0.01,
    )


def _kinds(requests: float, prompt_tokens: float) -> tuple[float, float]:
    """Return the requests of each kind, given their sum and the sum of their prompt tokens."""
    code, chat = (CLIPPED * kind.prompt for kind in KINDS)
    of_code = max(0.0, min(requests, (prompt_tokens - chat * requests) / (code - chat)))
    return of_code, requests - of_code


def _scale(cluster: Cluster, needs: Sequence[Counts]) -> None:
    cluster.scale("prefill", max(need.prefill for need in needs))
    cluster.scale("decode", max(need.decode for need in needs))


class Told:
    """A scaler that knows the requests that come until a pod that it asks for now serves."""

    def __init__(self, trace: Sequence[Request]) -> None:
        syncs = int(trace[-1].at_s / SYNC_S) + 2
        requests, tokens = [0] * syncs, [0] * syncs
        for request in trace:
            requests[int(request.at_s / SYNC_S)] += 1
            tokens[int(request.at_s / SYNC_S)] += request.prompt
        sizes = Sizes(TOLD_ATTAINMENT)
        self._needs = []
        for sync in range(syncs):
            window = slice(max(0, sync - 2), sync + 1)
            seconds = len(requests[window]) * SYNC_S
            self._needs.append(
                sizes.of(*_kinds(sum(requests[window]) / seconds, sum(tokens[window]) / seconds))
            )

    def sync(self, cluster: Cluster) -> None:
        now = min(int(cluster.clock.now / SYNC_S), len(self._needs) - 1)
        _scale(cluster, self._needs[now : now + int(START_S / SYNC_S) + 2])


class Usual:
    """A scaler that knows each hour's rates, and sees the requests of the last 45 s."""

    def __init__(self, attainment: float, headroom: float) -> None:
        self._sizes = Sizes(attainment)
        self._headroom = headroom
        self._looks: deque[tuple[float, int, int]] = deque(maxlen=4)
        self._needs: deque[tuple[float, Counts]] = deque()

    def sync(self, cluster: Cluster) -> None:
        now, counts = cluster.clock.now, cluster.ring.counts
        code, chat = (self._headroom * kind.rate(now + START_S) for kind in KINDS)
        self._needs.append((now, self._sizes.of(code, chat)))
        self._looks.append((now, counts.requests, counts.prompt_tokens))
        if len(self._looks) == self._looks.maxlen:
            then, requests, tokens = self._looks[0]
            passed = (now - then) / MARGIN
            rates = _kinds((counts.requests - requests) / passed, (counts.prompt_tokens - tokens) / passed)
            self._needs.append((now, self._sizes.of(*rates)))
        while self._needs[0][0] <= now - SETTLE_S:
            self._needs.popleft()
        _scale(cluster, [need for _, need in self._needs])


def _one(scaler: Scaler, trace: Sequence[Request], seed: int) -> Outcome:
    return simulate(trace, scaler, setting(START_S), FIRST, seed)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--hours", type=float, default=24.0)
    given = parser.parse_args()
    console = Console(width=150)
    for line in conditions("loadtest.planner.oracle"):
        console.print(line)
    days = {seed: day(seed, hours=given.hours) for seed in range(1, given.seeds + 1)}
    means = [Mean("told every request", [_one(Told(trace), trace, seed) for seed, trace in days.items()])]
    for attainment, headroom in USUALS:
        outcomes = [_one(Usual(attainment, headroom), trace, seed) for seed, trace in days.items()]
        means.append(Mean(f"usual rates, room for {headroom:g}x, {attainment:.0%}", outcomes))
    table(f"Pods start in {START_S:.0f} s", means, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
