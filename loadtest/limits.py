"""Two routers that keep one tenant's limit together through a real redis-server, and its faults.

    python -m loadtest.limits

First more is asked than the limit lets through, for longer than a minute: in every minute what the routers
together admitted is compared with the limit. Then less is asked than the limit, while Redis is stopped
(SIGSTOP), flushed, filled up and killed: every request must be answered. Fails (exit status 1) otherwise, and
if the routers' metrics do not tell of a fault, or if one request waited for Redis for longer than 50 ms. The
worker is simulated: a real one would keep the routers from running, and that is not Redis's doing.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from tests.support.chaos.campaign import percentile
from tests.support.redis_server import PROGRAM, RedisServer
from tests.support.ring import Ring, running, running_routers, scrape, simulated

MINUTE_S = 60.0
ALLOWED = 0.03
FAULT_S = 4.0


@dataclass
class Asked:
    """What became of the requests."""

    statuses: Counter[int] = field(default_factory=Counter)
    admitted_at: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    by_router: Counter[str] = field(default_factory=Counter)


async def ask(client: httpx.AsyncClient, url: str, asked: Asked) -> None:
    began = time.monotonic()
    body = {"model": "demo", "prompt": [1, 2, 3], "max_tokens": 1}
    try:
        response = await client.post(f"{url}/v1/completions", json=body)
        status = response.status_code
    except httpx.HTTPError:
        status = 0
    asked.statuses[status] += 1
    if status == 200:
        asked.admitted_at.append(began)
        asked.by_router[url] += 1
        asked.seconds.append(time.monotonic() - began)


async def load(urls: list[str], per_second: float, seconds: float) -> Asked:
    """Ask the routers in turn at an even rate, whether or not they have answered."""
    asked = Asked()
    tasks: set[asyncio.Task[None]] = set()
    async with httpx.AsyncClient(timeout=30) as client:
        began = time.monotonic()
        for number in range(int(per_second * seconds)):
            await asyncio.sleep(max(0.0, began + number / per_second - time.monotonic()))
            task = asyncio.create_task(ask(client, urls[number % len(urls)], asked))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)
    return asked


def in_minutes(admitted_at: list[float]) -> list[int]:
    """How many were admitted in the minute that begins with each of them, of the whole minutes."""
    times = sorted(admitted_at)
    return [
        sum(begin <= at < begin + MINUTE_S for at in times)
        for begin in times
        if begin + MINUTE_S <= times[-1]
    ]


async def saturate(rings: list[Ring], limit: int, shown: Table) -> bool:
    asked = await load([ring.url for ring in rings], 1.6 * limit / MINUTE_S, 1.4 * MINUTE_S)
    minutes = in_minutes(asked.admitted_at)
    least, most = min(minutes, default=0), max(minutes, default=0)
    shown.add_row("limit, requests a minute", str(limit))
    shown.add_row(
        "asked, admitted, refused", f"{asked.statuses.total()}, {asked.statuses[200]}, {asked.statuses[429]}"
    )
    shown.add_row("admitted by each router", ", ".join(str(count) for count in asked.by_router.values()))
    shown.add_row(
        "in any minute: least, most", f"{least} ({least / limit - 1:+.1%}), {most} ({most / limit - 1:+.1%})"
    )
    only = set(asked.statuses) <= {200, 429}
    return only and abs(least / limit - 1) <= ALLOWED and abs(most / limit - 1) <= ALLOWED


async def under(fault: str, redis: RedisServer, rings: list[Ring], limit: int, shown: Table) -> bool:
    """A quarter of the limit is asked while the fault lasts."""
    faults: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "none": (lambda: None, lambda: None),
        "stopped (SIGSTOP)": (redis.freeze, redis.thaw),
        "flushed": (redis.flush, lambda: None),
        "full (OOM)": (redis.fill, redis.empty),
        "killed (SIGKILL)": (redis.kill, redis.start),
    }
    begin, end = faults[fault]
    before = [scrape(f"{ring.url}/metrics") for ring in rings]
    running_load = asyncio.create_task(load([r.url for r in rings], limit / 4 / MINUTE_S, FAULT_S + 2))
    await asyncio.sleep(1)
    begin()
    await asyncio.sleep(FAULT_S / 2)
    during = [await asyncio.to_thread(scrape, f"{ring.url}/metrics") for ring in rings]
    await asyncio.sleep(FAULT_S / 2)
    await asyncio.to_thread(end)
    asked = await running_load
    await asyncio.sleep(3)
    after = [await asyncio.to_thread(scrape, f"{ring.url}/metrics") for ring in rings]
    told = sorted({name for b, a in zip(before, after, strict=True) for name in _told(b, a)})
    up = [metrics["baton_shared_state_up"] for metrics in during]
    recovered = all(metrics["baton_shared_state_up"] == 1 for metrics in after)
    figures = f"p50 {1e3 * percentile(asked.seconds, 50):.0f}, max {1e3 * max(asked.seconds):.0f} ms"
    statuses = ", ".join(f"{count} x {status}" for status, count in sorted(asked.statuses.items()))
    shown.add_row(f"Redis {fault}", f"{statuses}; {figures}; up {up}; {', '.join(told) or '-'}")
    visible = fault == "none" or bool(told)
    return set(asked.statuses) == {200} and visible and recovered


def _told(before: dict[str, float], after: dict[str, float]) -> list[str]:
    """The counters that grew and tell of a fault."""
    return [
        name.removeprefix("baton_shared_state_")
        for name, value in after.items()
        if value > before.get(name, 0.0)
        and (
            name.startswith("baton_shared_state_losses_total")
            or (name.startswith("baton_shared_state_calls_total") and 'result="ok"' not in name)
        )
    ]


def delays(rings: list[Ring]) -> tuple[float, float]:
    """How many admissions took longer than 50 ms, and all of them."""
    pages = [scrape(f"{ring.url}/metrics") for ring in rings]
    name = "baton_shared_state_delay_seconds"
    every = sum(page[f"{name}_count"] for page in pages)
    return every - sum(page[name + '_bucket{le="0.05"}'] for page in pages), every


async def measure(redis: RedisServer, rings: list[Ring], roomy: list[Ring], limit: int) -> bool:
    shown = Table("", "")
    fine = [await saturate(rings, limit, shown)]
    for fault in ("none", "stopped (SIGSTOP)", "flushed", "full (OOM)", "killed (SIGKILL)"):
        fine.append(await under(fault, redis, roomy, limit * 2, shown))
    late, every = delays([*rings, *roomy])
    shown.add_row("waited for Redis over 50 ms, of", f"{late:.0f}, {every:.0f}")
    verdict = all(fine) and not late
    shown.add_row("VERDICT", "ok" if verdict else "FAILED")
    Console(stderr=True).print(shown)
    return verdict


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", type=int, default=600, help="requests a minute of the first part")
    options = parser.parse_args()
    if PROGRAM is None:
        print("NOT RUN: there is no redis-server here (apt-get install redis-server)", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as directory:
        tmp = Path(directory)
        redis = RedisServer(tmp)
        redis.start()
        both = simulated(tmp, "both", "both", "--profile", "instant")
        try:
            with running([both]):
                flags = ("--redis-url", redis.url, "--limit-requests-per-minute")
                pairs = {"one": [both], "two": [both]}
                with running_routers(tmp, "demo", pairs, (*flags, str(options.limit))) as rings:
                    first = list(rings.values())
                    roomy = (*flags, str(100 * options.limit))
                    with running_routers(tmp, "demo", {"a": [both], "b": [both]}, roomy) as others:
                        fine = asyncio.run(measure(redis, first, list(others.values()), options.limit))
        finally:
            redis.kill()
    return int(not fine)


if __name__ == "__main__":
    sys.exit(main())
