"""Two routers that keep tenants' limits of tokens together, whatever n and max_tokens are.

    python -m loadtest.token_limits

Ten tenants, one for each n of 1, 2, 8, 64 and 128 with max_tokens and without, ask chats as fast as they may,
of both routers in turns, for longer than two minutes. Printed is the use in the worst minute that begins with
an admitted request, beside the limit; requests that could never fit must be refused as such. Then Redis is
killed: each router keeps its half of the limits by itself, and over two minutes the use may be no more than
two limits and the debt of one request for each router. Fails (exit status 1) if the use is more than 3 % over
that. The worker is simulated, and instant.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from baton.router.security.keys import digest_of
from tests.support.redis_server import PROGRAM, RedisServer
from tests.support.ring import Ring, running, running_routers, scrape, simulated

MINUTE_S = 60.0
ALLOWED = 1.03
NUMBERS = (1, 2, 8, 64, 128)
PAUSE_S = 0.25
ALONE_MINUTES = 2


@dataclass
class Asker:
    """A tenant that asks the same again and again."""

    n: int
    max_tokens: int | None
    used: list[tuple[float, int]] = field(default_factory=list)
    """The moments of the admissions, and the tokens that each request has used."""
    answers: Counter[str] = field(default_factory=Counter)
    """The number of answers by status or error code."""

    @property
    def name(self) -> str:
        return f"n{self.n}-{'open' if self.max_tokens is None else self.max_tokens}"

    async def ask(self, client: httpx.AsyncClient, url: str, max_tokens: int | None) -> None:
        body: dict[str, object] = {"messages": [{"role": "user", "content": "hi"}], "n": self.n}
        if max_tokens is not None:
            body["max_tokens"] = max_tokens
        began = time.monotonic()
        answer = await client.post(
            f"{url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {self.name}"}
        )
        document = answer.json()
        if answer.status_code == 200:
            self.used.append((began, document["usage"]["total_tokens"]))
            self.answers["200"] += 1
        else:
            self.answers[document["error"]["code"]] += 1

    async def run(self, client: httpx.AsyncClient, urls: Sequence[str], limit: int, seconds: float) -> None:
        await self.ask(client, urls[0], limit)  # this request never fits
        end, number = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            await self.ask(client, urls[number % len(urls)], self.max_tokens)
            number += 1
            await asyncio.sleep(PAUSE_S)

    def worst(self, minutes: int = 1) -> int:
        """Return the most tokens used in ``minutes`` minutes that begin with an admission."""
        return max(
            (
                sum(tokens for at, tokens in self.used if begin <= at < begin + minutes * MINUTE_S)
                for begin, _ in self.used
            ),
            default=0,
        )


def askers(limit: int) -> list[Asker]:
    return [Asker(n, max_tokens) for n in NUMBERS for max_tokens in (max(1, limit // 4 // n), None)]


def keys_file(path: Path, limit: int) -> Path:
    """Write the file of keys. Each tenant's key is its name: only this measurement reaches the routers."""
    names = [each.name for each in askers(limit)]
    document = {
        "tenants": {name: {"tokens_per_minute": limit} for name in names},
        "keys": [{"name": name, "hash": f"sha256:{digest_of(name).hex()}", "tenant": name} for name in names],
    }
    path.write_text(json.dumps(document))
    return path


async def load(rings: Sequence[Ring], limit: int, seconds: float) -> list[Asker]:
    asking = askers(limit)
    async with httpx.AsyncClient(timeout=60) as client:
        urls = [ring.url for ring in rings]
        await asyncio.gather(*(each.run(client, urls, limit, seconds) for each in asking))
    return asking


def tell(asking: Sequence[Asker], limit: int, minutes: int, most: float, title: str) -> bool:
    """Print the tenants' use. ``most``: the limits that may be used in ``minutes`` minutes."""
    shown = Table("n", "max_tokens", "admitted", "refused", "never fits", f"used / limit, {title}")
    fine = True
    for each in asking:
        worst = each.worst(minutes) / limit
        fine &= worst <= most and each.answers["request_too_large"] == 1 and each.answers["200"] > 0
        refused, never = each.answers["rate_limit_exceeded"], each.answers["request_too_large"]
        open_ = "-" if each.max_tokens is None else str(each.max_tokens)
        shown.add_row(str(each.n), open_, str(each.answers["200"]), str(refused), str(never), f"{worst:.3f}")
        fine &= set(each.answers) <= {"200", "rate_limit_exceeded", "request_too_large"}
    shown.add_row("VERDICT", "", "", "", "", "ok" if fine else "FAILED")
    Console(stderr=True).print(shown)
    return fine


def decisions(rings: Sequence[Ring]) -> Counter[str]:
    """Return how many decisions were made by Redis, and how many by a router alone."""
    made: Counter[str] = Counter()
    for ring in rings:
        for name, value in scrape(f"{ring.url}/metrics").items():
            if name.startswith("baton_limit_decisions_total"):
                made["redis" if 'by="redis"' in name else "local"] += int(value)
    return made


def measure(redis: RedisServer, rings: Sequence[Ring], limit: int, seconds: float) -> bool:
    together = asyncio.run(load(rings, limit, seconds))
    made = decisions(rings)
    print(f"decided by Redis: {made['redis']}, by a router alone: {made['local']}", file=sys.stderr)
    # On a machine so busy that Redis is late, routers decide alone now and then, and may owe for a request.
    most = ALLOWED if not made["local"] else ALLOWED + len(rings) - 1
    fine = tell(together, limit, 1, most, "worst minute")
    redis.kill()
    time.sleep(MINUTE_S + 1)  # lets requests that were admitted together leave the window
    alone = asyncio.run(load(rings, limit, ALONE_MINUTES * MINUTE_S + 10))
    most = ALONE_MINUTES * ALLOWED + len(rings) - 1
    return tell(alone, limit, ALONE_MINUTES, most, f"worst {ALONE_MINUTES} minutes without Redis") and fine


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", type=int, default=3000, help="tokens a minute of each tenant")
    parser.add_argument("--seconds", type=float, default=130.0, help="how long they ask together")
    options = parser.parse_args()
    if PROGRAM is None:
        print("NOT RUN: there is no redis-server here (apt-get install redis-server)", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as directory:
        tmp = Path(directory)
        redis = RedisServer(tmp)
        redis.start()
        both = simulated(tmp, "both", "both", "--profile", "instant")
        keys = keys_file(tmp / "keys.json", options.limit)
        flags = ("--redis-url", redis.url, "--redis-timeout-ms", "45", "--api-keys", str(keys))
        try:
            with (
                running([both]),
                running_routers(tmp, "demo", {"one": [both], "two": [both]}, flags) as rings,
            ):
                fine = measure(redis, list(rings.values()), options.limit, options.seconds)
        finally:
            redis.kill()
    return int(not fine)


if __name__ == "__main__":
    sys.exit(main())
