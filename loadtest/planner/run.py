"""One day with one scaler, and its outcome."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.planner.measured import Counts
from loadtest.planner.cluster import Cluster, Setting
from loadtest.planner.ring import Clock
from loadtest.planner.scalers import SYNC_S, Scaler
from loadtest.planner.trace import Request

TAIL_S = 900.0
"""The time after the last request in which its answer may end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    requests: int
    attainment: float
    """The share of requests that met both targets. A request that was never answered met none."""
    ttft_met: float
    itl_met: float
    gpu_hours: float
    scalings: int
    switches: int
    moved: int
    """Answers that went on elsewhere."""
    ttft_p99: float


def simulate(trace: Sequence[Request], scaler: Scaler, setting: Setting, first: Counts, seed: int) -> Outcome:
    """Simulate the trace. GPU-hours count until the last request has come."""
    clock = Clock()
    cluster = Cluster(clock, setting, first, seed)
    end = trace[-1].at_s
    requests = iter(trace)

    def arrive(request: Request) -> None:
        cluster.ring.take(request)
        following = next(requests, None)
        if following is not None:
            clock.at(following.at_s, lambda: arrive(following))

    def sync() -> None:
        scaler.sync(cluster)
        clock.at(clock.now + SYNC_S, sync)

    begins = next(requests)
    clock.at(begins.at_s, lambda: arrive(begins))
    clock.at(SYNC_S, sync)
    clock.run(end)
    clock.now = end
    gpu_hours = cluster.gpu_hours
    clock.run(end + TAIL_S)
    done, count = cluster.ring.done, len(trace)
    ttfts = sorted(done.ttfts)
    return Outcome(
        requests=count,
        attainment=done.both_met / count,
        ttft_met=done.ttft_met / count,
        itl_met=done.itl_met / count,
        gpu_hours=gpu_hours,
        scalings=cluster.scalings,
        switches=cluster.switches,
        moved=done.moved,
        ttft_p99=ttfts[int(0.99 * len(ttfts))],
    )
