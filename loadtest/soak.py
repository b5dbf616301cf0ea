"""A short soak test: steady load on two routers while workers die, hang, drain and freeze and Redis stumbles.

    python -m loadtest.soak --minutes 30

The workers are simulated, and every stream that is read to its end must have the tokens that an undisturbed
one would have. At the end no stream, block, reservation or task may be left, and the routers' memory may have
grown by no more than 5 % since the load had settled. Fails (exit status 1) otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from baton import hub
from baton.models.config import ModelConfig
from loadtest.conditions import conditions
from tests.support.redis_server import PROGRAM, RedisServer
from tests.support.ring import Ring, Service, running, running_routers, scrape, simulated
from tests.support.simulated import simulated_answer

GROWTH = 0.05
SETTLE_S = 180.0
"""The time after which the routers' memory must stay as it is, in seconds."""
SAMPLE_S = 5.0
VOCABULARY = 4096
"""The bound of prompts' token ids, no larger than the demo model's vocabulary."""
PROFILE = {"step_base_ms": 12, "step_row_ms": 0.1, "context_ms_per_1k": 0.1, "prefill_ms_per_1k": 30}
OPEN = (
    "baton_requests_in_flight",
    "baton_worker_sequences_running",
    "baton_worker_sequences_waiting",
    "baton_worker_handoffs_open",
)
"""Metrics of routers that are 0 when no request is under way."""
FAULTS = ("hang_mean_s=120", "hang_s=4", "slow_mean_s=60", "slow_s=5")


@dataclass
class Account:
    """The outcome of the streams, and the routers' memory."""

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    memory: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    """Samples by router: the moment, and the memory in bytes."""
    tokens: int = 0


@dataclass
class Soak:
    """A run of the soak test."""

    rings: Sequence[Ring]
    redis: RedisServer
    vocab_size: int
    seed: int
    account: Account = field(default_factory=Account)
    over: bool = False

    async def run(self, seconds: float, clients: int) -> None:
        rng = random.Random(self.seed)
        async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None)) as http:
            streams = [
                asyncio.create_task(self._ask_on(http, random.Random(rng.random()))) for _ in range(clients)
            ]
            others = [
                asyncio.create_task(task)
                for task in (self._disturb(random.Random(rng.random())), self._mend(), self._weigh())
            ]
            await asyncio.sleep(seconds)
            others[0].cancel()
            await asyncio.sleep(15)  # lets the last faults be mended
            self.over = True
            await asyncio.gather(*streams)
            for task in others[1:]:
                task.cancel()
            for ended in await asyncio.gather(*others, return_exceptions=True):
                if not isinstance(ended, asyncio.CancelledError):
                    self.account.problems.append(f"nothing more was done to them: {ended!r}")
                    self.account.outcomes["STOPPED"] += 1

    # --- load

    async def _ask_on(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        while not self.over:
            try:
                outcome = await self._ask(http, rng)
            except (httpx.HTTPError, OSError) as error:
                outcome = f"broken: {type(error).__name__}"
                self.account.problems.append(repr(error))
            self.account.outcomes[outcome] += 1
            await asyncio.sleep(rng.expovariate(2.0))

    async def _ask(self, http: httpx.AsyncClient, rng: random.Random) -> str:
        """Ask for one stream; some are left in the middle, and some are read slowly."""
        prompt = [rng.randrange(VOCABULARY) for _ in range(rng.choice((8, 60, 400, 1500)))]
        length = rng.randint(5, 200)
        leave_after = rng.randint(1, length) if rng.random() < 0.1 else None
        pause = 0.02 if rng.random() < 0.05 else 0.0
        body = {
            "model": "demo",
            "prompt": prompt,
            "max_tokens": length,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        url = rng.choice(list(self.rings)).url
        told: list[int] = []
        async with http.stream("POST", f"{url}/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                problem = (await answer.aread()).decode()[:300]
                self.account.problems.append(f"{answer.status_code} {problem}")
                return f"status {answer.status_code}"
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    self.account.problems.append(line[:300])
                    return "error event"
                told += event["choices"][0].get("token_ids") or []
                if leave_after is not None and len(told) >= leave_after:
                    return "left"
                await asyncio.sleep(pause)
        self.account.tokens += len(told)
        if told != simulated_answer(prompt, length, self.vocab_size):
            self.account.problems.append(f"{len(told)} of {length} tokens, not as they should be: {told[:8]}")
            return "WRONG"
        return "complete"

    # --- faults

    async def _disturb(self, rng: random.Random) -> None:
        """Cause one fault after the other; workers fail by themselves besides."""
        faults: dict[str, Callable[[random.Random], object]] = {
            "kill -9": lambda r: self._worker(r).process.kill(),
            "drain": lambda r: self._worker(r).process.terminate(),
            "freeze": self._freeze,
            "Redis frozen": self._freeze_redis,
            "Redis flushed": lambda _: self.redis.flush(),
        }
        while True:
            await asyncio.sleep(rng.uniform(5, 15))
            name = rng.choice(list(faults))
            self.account.faults[name] += 1
            await asyncio.to_thread(faults[name], rng)

    def _worker(self, rng: random.Random) -> Service:
        """Return a worker that runs, or any if none does."""
        workers = self.rings[0].workers
        return rng.choice([w for w in workers if w.process.poll() is None] or workers)

    def _freeze(self, rng: random.Random) -> None:
        worker = self._worker(rng)
        worker.freeze()
        time.sleep(rng.uniform(0.5, 6))
        worker.thaw()

    def _freeze_redis(self, rng: random.Random) -> None:
        self.redis.freeze()
        time.sleep(rng.uniform(0.5, 3))
        self.redis.thaw()

    async def _mend(self) -> None:
        """Start the processes again that have ended."""
        while True:
            await asyncio.sleep(0.5)
            for worker in self.rings[0].workers:
                if worker.process.poll() is not None:
                    self.account.faults["restarts"] += 1
                    await asyncio.to_thread(worker.restart)

    async def _weigh(self) -> None:
        began = time.monotonic()
        while True:
            for ring in self.rings:
                size = psutil.Process(ring.router.process.pid).memory_info().rss
                self.account.memory.setdefault(ring.router.name, []).append((time.monotonic() - began, size))
            await asyncio.sleep(SAMPLE_S)

    # --- the end

    def left_over(self, tasks_before: dict[str, float]) -> list[str]:
        """Return what should be gone some seconds after the load has ended."""
        problems: list[str] = []
        deadline = time.monotonic() + 30
        while True:
            problems = self._left_now(tasks_before)
            if not problems or time.monotonic() > deadline:
                return problems
            time.sleep(0.5)

    def _left_now(self, tasks_before: dict[str, float]) -> list[str]:
        found = []
        for ring in self.rings:
            page = scrape(f"{ring.url}/metrics")
            name = ring.router.name
            for metric, value in page.items():
                if metric.startswith(OPEN) and value:
                    found.append(f"{name}: {metric} is {value:g}")
            tasks = page["baton_router_tasks"]
            if tasks > tasks_before[name]:
                found.append(f"{name}: {tasks:g} tasks, {tasks_before[name]:g} before the load")
        for worker in self.rings[0].workers:
            held = worker.blocks()["held"]
            if held:
                found.append(f"{worker.name} holds {held} blocks")
        client = self.redis.client()
        for key in client.scan_iter("*:leases"):
            if count := client.zcard(key):
                found.append(f"Redis has {count} reservations in {key.decode()}")
        return found


def growth(samples: Sequence[tuple[float, int]]) -> float:
    """Return the memory at the end over the memory after it had settled, less 1; both are medians of 60 s."""
    end = samples[-1][0]
    settled = min(SETTLE_S, end / 3)
    before = [size for at, size in samples if settled <= at < settled + 60]
    after = [size for at, size in samples if at > end - 60]
    return statistics.median(after) / statistics.median(before) - 1


def report(soak: Soak, left: Sequence[str], seconds: float) -> bool:
    account = soak.account
    shown = Table("", "")
    shown.add_row("seconds, tokens", f"{seconds:.0f}, {account.tokens}")
    shown.add_row("streams", ", ".join(f"{count} {name}" for name, count in account.outcomes.most_common()))
    shown.add_row("faults", ", ".join(f"{count} x {name}" for name, count in account.faults.most_common()))
    fine = not left and set(account.outcomes) <= {"complete", "left"}
    for name, samples in account.memory.items():
        grown = growth(samples)
        fine &= grown < GROWTH
        shown.add_row(f"memory of router {name}", f"{samples[-1][1] / 2**20:.0f} MiB, {grown:+.1%}")
    shown.add_row("left at the end", "; ".join(left) or "nothing")
    for problem in account.problems[:10]:
        shown.add_row("problem", problem)
    shown.add_row("VERDICT", "ok" if fine else "FAILED")
    Console(width=140).print(shown)
    return fine


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--logs", type=Path, help="where the logs go; default: a temporary folder")
    chosen = parser.parse_args()
    if PROGRAM is None:
        print("NOT RUN: there is no redis-server here (apt-get install redis-server)", file=sys.stderr)
        return 1
    for line in conditions("loadtest.soak"):
        print(line)
    with tempfile.TemporaryDirectory() as scratch:
        tmp = chosen.logs or Path(scratch)
        tmp.mkdir(parents=True, exist_ok=True)
        (tmp / "profile.json").write_text(json.dumps(PROFILE))
        redis = RedisServer(tmp)
        redis.start()
        options = ["--profile", str(tmp / "profile.json"), "--verify-handoff"]
        options += [flag for fault in FAULTS for flag in ("--fault", fault)]
        workers = [
            simulated(tmp, f"{role}-{i}", role, *options) for role in ("prefill", "decode") for i in range(2)
        ]
        flags = ("--redis-url", redis.url, "--limit-concurrent-requests", "100000")
        try:
            with (
                running(workers),
                running_routers(tmp, "demo", {"a": workers, "b": workers}, flags) as rings,
            ):
                return int(not _soak(list(rings.values()), redis, chosen))
        finally:
            redis.kill()


def _soak(rings: Sequence[Ring], redis: RedisServer, chosen: argparse.Namespace) -> bool:
    before = {ring.router.name: scrape(f"{ring.url}/metrics")["baton_router_tasks"] for ring in rings}
    soak = Soak(rings, redis, ModelConfig.from_dir(hub.resolve_model("demo")).vocab_size, chosen.seed)
    began = time.monotonic()
    asyncio.run(soak.run(chosen.minutes * 60, chosen.clients))
    return report(soak, soak.left_over(before), time.monotonic() - began)


if __name__ == "__main__":
    sys.exit(main())
