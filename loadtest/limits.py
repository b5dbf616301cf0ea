"""Two routers that keep one tenant's limit together through a real redis-server, and its faults.

    python -m loadtest.limits [--only window|faults]

First more is asked than the limit lets through, for longer than a minute: in every minute the admissions of
both routers together are compared with the limit. Then less is asked than the limit, while Redis is stopped
(SIGSTOP), slow, flushed, filled up, killed and failed over to a replica; while its password changes, the
password's file cannot be read and its user lacks a right; and while its certificate is not trusted. A line
for each fault gives how many requests failed (none may), the longest wait, how many waited for Redis for
longer than 50 ms (none may), after how many seconds limits were shared again (5 at most), and the metrics'
name for the fault. Exit status 1 unless every bound holds. The worker is simulated: a real one would take the
routers' CPU, and the measurement is of Redis.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from loadtest.redis_faults import behind_a_name, load, with_a_user, with_tls
from tests.support.redis_server import PROGRAM, RedisServer
from tests.support.ring import Ring, Service, running, running_routers, simulated

MINUTE_S = 60.0
ALLOWED = 0.03


def in_minutes(admitted_at: list[float]) -> list[int]:
    """Return, for each admission, how many requests were admitted in the minute that begins with it; whole
    minutes only."""
    times = sorted(admitted_at)
    return [
        sum(begin <= at < begin + MINUTE_S for at in times)
        for begin in times
        if begin + MINUTE_S <= times[-1]
    ]


async def saturate(rings: list[Ring], limit: int, shown: Table) -> bool:
    urls = [ring.url for ring in rings]
    asked = await load(urls, 1.6 * limit / MINUTE_S, lambda seconds: seconds >= 1.4 * MINUTE_S)
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


async def window(tmp: Path, both: Service, limit: int, shown: Table) -> bool:
    redis = RedisServer(tmp)
    redis.start()
    flags = ("--redis-url", redis.url, "--limit-requests-per-minute", str(limit))
    routers = running_routers(tmp, "demo", {"one": [both], "two": [both]}, flags)
    try:
        rings = await asyncio.to_thread(routers.__enter__)
        try:
            return await saturate(list(rings.values()), limit, shown)
        finally:
            await asyncio.to_thread(routers.__exit__, None, None, None)
    finally:
        redis.kill()


async def measure(tmp: Path, both: Service, options: argparse.Namespace) -> bool:
    shown = Table("", "")
    fine = []
    if options.only != "faults":
        fine.append(await window(tmp, both, options.limit, shown))
    if options.only != "window":
        for part in (behind_a_name, with_a_user, with_tls):
            fine.append(await part(tmp, both, shown))
    shown.add_row("VERDICT", "ok" if all(fine) else "FAILED")
    Console(stderr=True, width=160).print(shown)
    return all(fine)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", type=int, default=600, help="requests a minute of the first part")
    parser.add_argument("--only", choices=("window", "faults"), help="one of the parts; default: both")
    options = parser.parse_args()
    if PROGRAM is None:
        print("NOT RUN: there is no redis-server here (apt-get install redis-server)", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as directory:
        tmp = Path(directory)
        both = simulated(tmp, "both", "both", "--profile", "instant")
        with running([both]):
            fine = asyncio.run(measure(tmp, both, options))
    return int(not fine)


if __name__ == "__main__":
    sys.exit(main())
