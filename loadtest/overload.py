"""A ring that is asked for several times what it can answer: goodput, refusals, and tenants' shares.

    python -m loadtest.overload --factor 5 --seconds 20

Finds by a closed loop how many requests a second the ring answers, then asks for that and for ``--factor``
times as many, at random moments (Poisson), from three tenants with weights 1, 1 and 2. Good is an answer
within ``--patience`` seconds, which the clients also tell the server. Fails (exit status 1) if goodput at the
factor is below 0.9 of the best, a tenant's share of tokens is not within 10 %, or refusals take 50 ms and
more (99th percentile). The worker is `baton both` with the demo model; all share one machine.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import orjson
from rich.console import Console
from rich.table import Table

from baton.router.security.keys import entry_line, new_key
from tests.support.chaos.campaign import percentile
from tests.support.ring import Ring, running_ring

WEIGHTS = {"a": 1.0, "b": 1.0, "c": 2.0}
GOODPUT = 0.9
SHARE = 0.1
REFUSAL_S = 0.05


@dataclass
class Seen:
    """What became of the requests of one run."""

    seconds: float
    statuses: Counter[int] = field(default_factory=Counter)
    good: int = 0
    tokens: Counter[str] = field(default_factory=Counter)
    refusals_s: list[float] = field(default_factory=list)

    @property
    def goodput(self) -> float:
        return self.good / self.seconds

    def share(self, tenant: str) -> float:
        return self.tokens[tenant] / max(1, self.tokens.total())


class Asker:
    """Clients of all tenants."""

    def __init__(
        self, url: str, keys: Mapping[str, str], *, patience_s: float, outputs: int, seed: int
    ) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        self._http = httpx.AsyncClient(base_url=url, timeout=patience_s + 30, limits=limits)
        self._keys = keys
        self._patience_s = patience_s
        self._outputs = outputs
        self._rng = random.Random(seed)

    async def close(self) -> None:
        await self._http.aclose()

    async def ask(self, tenant: str, seen: Seen | None) -> None:
        """One request of random length, noted in ``seen``."""
        prompt = [self._rng.randrange(3, 200) for _ in range(self._rng.randint(8, 48))]
        outputs = self._rng.randint(self._outputs // 2, self._outputs * 3 // 2)
        body = {"model": "demo", "prompt": prompt, "max_tokens": outputs, "ignore_eos": True}
        headers = {"x-api-key": self._keys[tenant], "x-request-timeout": f"{self._patience_s:g}"}
        began = time.monotonic()
        try:
            response = await self._http.post("/v1/completions", json=body, headers=headers)
        except httpx.HTTPError:
            if seen is not None:
                seen.statuses[0] += 1
            return
        took = time.monotonic() - began
        if seen is None:
            return
        seen.statuses[response.status_code] += 1
        if response.status_code == 200:
            seen.good += took <= self._patience_s
            seen.tokens[tenant] += response.json()["usage"]["total_tokens"]
        elif response.status_code in (429, 503):
            seen.refusals_s.append(took)

    async def closed(self, at_once: int, seconds: float) -> float:
        """Requests a second that so many clients get, each asking again as soon as it is answered."""
        seen = Seen(seconds)
        until = time.monotonic() + seconds

        async def client(number: int) -> None:
            while time.monotonic() < until:
                await self.ask("abc"[number % 3], seen)

        await asyncio.gather(*map(client, range(at_once)))
        return seen.statuses[200] / seconds

    async def open(self, per_second: float, seconds: float, warm_up_s: float) -> Seen:
        """Requests at random moments; those of the warm-up do not count."""
        seen = Seen(seconds)
        tasks: set[asyncio.Task[None]] = set()
        began = time.monotonic()
        at = 0.0
        while at < warm_up_s + seconds:
            at += self._rng.expovariate(per_second)
            await asyncio.sleep(max(0.0, began + at - time.monotonic()))
            counted = seen if at >= warm_up_s else None
            task = asyncio.create_task(self.ask(self._rng.choice("abc"), counted))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)
        return seen


def refusals_s(audit: Path) -> list[float]:
    """What refusals took in the router, by its audit log: without the client, which is busy itself."""
    lines = [orjson.loads(line) for line in audit.read_bytes().splitlines()]
    return [line["ms"] / 1e3 for line in lines if line["status"] in (429, 503)]


async def measure(
    ring: Ring, keys: Mapping[str, str], options: argparse.Namespace, seats: int, audit: Path
) -> bool:
    asker = Asker(ring.url, keys, patience_s=options.patience, outputs=options.outputs, seed=options.seed)
    console = Console()
    try:
        await asker.closed(seats, 3.0)
        rate = await asker.closed(seats, options.seconds / 2)
        console.print(f"{rate:.1f} requests a second in a closed loop of {seats}")
        runs: dict[float, Seen] = {}
        for factor in (0.8, 1.0, options.factor):
            runs[factor] = await asker.open(factor * rate, options.seconds, options.seconds / 4)
            console.print(f"at {factor:g}: {runs[factor].goodput:.2f} good answers a second")
    finally:
        await asker.close()
    table = Table("load", "good/s", "statuses", "refused p99 ms", "shares a b c")
    for factor, seen in runs.items():
        refused = f"{1e3 * percentile(seen.refusals_s, 99):.1f}" if seen.refusals_s else "-"
        shares = " ".join(f"{seen.share(tenant):.3f}" for tenant in WEIGHTS)
        table.add_row(f"{factor:g}", f"{seen.goodput:.2f}", str(dict(seen.statuses)), refused, shares)
    console.print(table)
    return judged(runs, runs[options.factor], refusals_s(audit), console)


def judged(runs: Mapping[float, Seen], overload: Seen, refusals: Sequence[float], console: Console) -> bool:
    """Whether what was promised holds."""
    peak = max(seen.goodput for seen in runs.values())
    total = sum(WEIGHTS.values())
    worst = max(abs(overload.share(name) * total / weight - 1) for name, weight in WEIGHTS.items())
    slowest = percentile(refusals, 99) if refusals else 0.0
    median = percentile(refusals, 50) if refusals else 0.0
    console.print(
        f"goodput {overload.goodput / peak:.2f} of its peak, shares within {100 * worst:.0f} %, "
        f"refusals in the router within {1e3 * slowest:.1f} ms (half of them {1e3 * median:.1f} ms)"
    )
    return overload.goodput >= GOODPUT * peak and worst <= SHARE and slowest < REFUSAL_S


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--factor", type=float, default=5.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--patience", type=float, default=6.0)
    parser.add_argument("--outputs", type=int, default=150, help="tokens of an answer, about")
    parser.add_argument("--seats", type=int, default=4, help="what the worker runs at once")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    keys = {tenant: new_key() for tenant in WEIGHTS}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "keys.yaml"
        weights = ", ".join(f"{name}: {{weight: {weight}}}" for name, weight in WEIGHTS.items())
        lines = [entry_line(key, f"{name}-key", name) for name, key in keys.items()]
        file.write_text("\n".join([f"tenants: {{{weights}}}", "keys:", *lines]))
        with running_ring(
            Path(folder) / "ring",
            prefill=0,
            decode=0,
            both=1,
            options=["--max-num-seqs", str(options.seats)],
            router_options=["--api-keys", str(file), "--audit-log", str(Path(folder) / "audit")],
            disaggregation="never",
        ) as ring:
            good = asyncio.run(measure(ring, keys, options, options.seats, Path(folder) / "audit"))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
