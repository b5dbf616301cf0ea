"""The placement that ships, in simulation: against least-loaded on traces that share and one that does not,
conditional disaggregation against always and never, and the time of a decision.

    python -m loadtest.placement [--seconds 120] [--parts sharing,conditional,decisions,memory]

8 prefill and 16 decode workers, whose times (`loadtest.placement.profile`) are stated, not measured. The
policy, the index of blocks, the block pool with its eviction and the fits of step times are the real ones;
load reports and block events reach the router late, as in a real ring. Everything is drawn from seeds, so
that a run can be repeated; only the times of decisions are this machine's.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from rich.console import Console
from rich.table import Table

from baton.core.block_hash import hash_blocks, short
from baton.core.kv_groups_proto import needs_to_proto
from baton.core.prefix_hit import GroupNeeds
from baton.router.fleet.worker_client import Watcher, WorkerClient
from baton.router.placement import DISAGGREGATIONS, PlacementOptions
from baton.router.placement.index import PrefixIndex
from baton.router.placement.placer import Placer
from baton.v1 import worker_pb2 as pb
from loadtest.placement import traces
from loadtest.placement.fleet import LeastLoaded, Outcome, Policy, Shipped, Sticky, simulate
from loadtest.placement.profile import Profile
from loadtest.placement.traces import Conversation, lognormal

PARTS = ("sharing", "conditional", "decisions", "memory")
PREFILL, DECODE = 8, 16


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one run, in seconds but for the first four."""

    requests: int
    hit_tokens: int
    prefill_busy: float
    decode_busy: float
    ttft_p50: float
    ttft_p90: float
    itl_p99: float
    answer_mean: float
    """The time from the request to its last token."""

    @classmethod
    def of(cls, outcome: Outcome, profile: Profile) -> Figures:
        ttft = sorted(job.first_at + profile.message_s - job.came_at for job in outcome.jobs)
        gaps = sorted(gap for job in outcome.jobs for gap in job.gaps)
        return cls(
            len(outcome.jobs),
            sum(job.cached for job in outcome.jobs),
            outcome.busy["prefill"],
            outcome.busy["decode"],
            at(ttft, 0.5),
            at(ttft, 0.9),
            at(gaps, 0.99),
            statistics.fmean(job.done_at - job.came_at for job in outcome.jobs),
        )

    def cells(self) -> list[str]:
        ms = (self.ttft_p50, self.ttft_p90, self.itl_p99, self.answer_mean)
        busy = f"{100 * self.prefill_busy:.0f} / {100 * self.decode_busy:.0f}"
        return [f"{self.requests}", f"{self.hit_tokens / 1e6:.2f}", busy, *(f"{1e3 * s:.1f}" for s in ms)]


COLUMNS = (
    "requests",
    "hit tokens, M",
    "busy P / D, %",
    "TTFT p50",
    "TTFT p90",
    "ITL p99",
    "answer, mean",
)


def at(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def run(trace: Sequence[Conversation], policy: Policy) -> Figures:
    profile = Profile()
    return Figures.of(simulate(trace, policy, profile, PREFILL, DECODE), profile)


class Checks:
    """The bounds to hold, and whether each did."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.failed = 0

    def that(self, what: str, value: float, bound: str, held: bool) -> None:
        self.failed += not held
        self._console.print(f"  {'met   ' if held else 'MISSED'}  {what}: {value:.3f} ({bound})")


# --- traces that share, and one that does not


def sharing(seconds: float, console: Console, checks: Checks) -> None:
    cases = (
        ("multi-turn", traces.multi_turn(1, 12.0, seconds), True),
        ("shared prefix", traces.shared_prefix(2, 40.0, seconds), True),
        ("no sharing", traces.single(3, 40.0, seconds, (KINDS["mixed"][0],)), False),
    )
    table = Table(title="Placement against least-loaded; ms", title_justify="left")
    for column in ("trace", "policy", *COLUMNS):
        table.add_column(column, justify="right")
    told: list[tuple[str, float, str, bool]] = []
    for name, trace, shares in cases:
        least = run(trace, LeastLoaded())
        table.add_row(name, "least-loaded", *least.cells())
        if name == "multi-turn":
            table.add_row("", "session affinity", *run(trace, Sticky()).cells())
        for kind in ("always", "conditional"):
            ours = run(trace, Shipped(PlacementOptions(kind)))
            table.add_row("", f"ours, {kind}", *ours.cells())
            ttft, answer = ours.ttft_p90 / least.ttft_p90, ours.answer_mean / least.answer_mean
            if shares:
                hits = ours.hit_tokens / max(1, least.hit_tokens)
                told.append((f"{name}, {kind}: hit tokens to least-loaded's", hits, ">= 1.5", hits >= 1.5))
                told.append((f"{name}, {kind}: P90 TTFT to least-loaded's", ttft, "<= 0.7", ttft <= 0.7))
            else:
                told.append((f"{name}, {kind}: P90 TTFT to least-loaded's", ttft, "<= 1.03", ttft <= 1.03))
                told.append((f"{name}, {kind}: answer to least-loaded's", answer, "<= 1.03", answer <= 1.03))
    console.print(table)
    for one in told:
        checks.that(*one)


# --- conditional disaggregation

KINDS = {
    "short prompts, long answers": ((lognormal(300, 0.7, 16, 4000), lognormal(400, 0.5, 16, 1500)),),
    "long prompts, short answers": ((lognormal(6000, 0.5, 500, 24_000), lognormal(60, 0.5, 4, 400)),),
    "mixed": (
        (lognormal(1500, 0.8, 16, 16_000), lognormal(200, 0.6, 8, 1000)),
        (lognormal(300, 0.7, 16, 4000), lognormal(400, 0.5, 16, 1500)),
    ),
}
RATES = {"short prompts, long answers": 60.0, "long prompts, short answers": 14.0, "mixed": 40.0}


def conditional(seconds: float, console: Console, checks: Checks) -> None:
    table = Table(title="Where prompts are computed; ms", title_justify="left")
    for column in ("mix", "disaggregation", *COLUMNS):
        table.add_column(column, justify="right")
    told = []
    for number, (name, kinds) in enumerate(KINDS.items()):
        trace = traces.single(10 + number, RATES[name], seconds, kinds)
        found = {}
        for kind in DISAGGREGATIONS:
            found[kind] = run(trace, Shipped(PlacementOptions(kind)))
            table.add_row(name if not found.keys() - {kind} else "", kind, *found[kind].cells())
        better = min(found["always"].answer_mean, found["never"].answer_mean)
        told.append((f"{name}: mean answer to the better of both", found["conditional"].answer_mean / better))
    console.print(table)
    for what, ratio in told:
        checks.that(what, ratio, "<= 1.05", ratio <= 1.05)


# --- the time of a decision


def decisions(console: Console, checks: Checks) -> None:
    table = Table(title="One decision on this machine; microseconds", title_justify="left")
    for column in ("workers", "prompt", "held by", "layers keep", "median", "p99"):
        table.add_column(column, justify="right")
    told: list[tuple[str, float, float]] = []
    for count, bound in ((64, 200e-6), (1000, 1000e-6)):
        most = bound
        for prompt_tokens, held, kept in CASES:
            times = sorted(decide_often(count, prompt_tokens, held, KEPT[kept]))
            median, p99 = at(times, 0.5), at(times, 0.99)
            micros = (f"{median * 1e6:.0f}", f"{p99 * 1e6:.0f}")
            table.add_row(f"{count}", f"{prompt_tokens}", f"{held:.0%}", kept, *micros)
            if prompt_tokens == 2048:
                told.append((f"{count} workers, {kept}: median, us", median * 1e6, most * 1e6))
                if kept == "all tokens":
                    most = SEVERAL_GROUPS * median
    console.print(table)
    for what, value, most in told:
        checks.that(what, value, f"<= {most:.0f}", value <= most)


KEPT = {
    "all tokens": (GroupNeeds("full"),),
    "and a window": (GroupNeeds("full"), GroupNeeds("window", 1024)),
    "and a state": (GroupNeeds("full"), GroupNeeds("state")),
}
CASES = (
    (512, 0, "all tokens"),
    *((prompt_tokens, 0.1, kept) for prompt_tokens in (2048, 16384) for kept in KEPT),
)
SEVERAL_GROUPS = 1.25
"""Most that a decision among workers of several groups takes, as a multiple of one among those of one."""
SNAPSHOT_BLOCKS = 8
"""Blocks from one snapshot of a state to the next."""


def decide_often(
    workers: int, prompt_tokens: int, held: float, needs: Sequence[GroupNeeds], rounds: int = 400
) -> list[float]:
    """Return the time of each decision in seconds: reports that are computed when they are needed, digests,
    index and policy. Before each decision, ``REPORTED`` workers have sent a load report. ``held``: the share
    of the workers that hold a beginning of the prompt, of random length, up to 90 %: what their groups of
    layers need of it."""
    draw = random.Random(workers)
    placer = Placer(PlacementOptions())
    profile = Profile()
    prompt = [draw.randrange(1 << 17) for _ in range(prompt_tokens)]
    blocks = [short(digest) for digest in hash_blocks(prompt, profile.block_size)]
    clients = [client(n, profile) for n in range(workers)]
    holders = set(draw.sample(range(workers), round(held * workers)))
    for number, one in enumerate(clients):
        assert one.hello is not None
        one.hello.kv_groups.extend(map(needs_to_proto, needs))
        placer.joined(one.address, one.hello)
        most = int(0.9 * len(blocks) * draw.random()) if number in holders else 0
        placer.told(one.address, held_blocks(blocks[:most], needs, profile.block_size))
        one.take_load(random_load(draw, profile))
    times = []
    for _ in range(rounds):
        for one in draw.sample(clients, REPORTED):
            one.take_load(random_load(draw, profile))
        began = time.perf_counter()
        placer.place("", prompt, [one.report() for one in clients])
        times.append(time.perf_counter() - began)
    return times


def held_blocks(blocks: list[int], needs: Sequence[GroupNeeds], block_size: int) -> pb.BlockEvents:
    """Return the account of a worker that keeps of a prefix what it needs to go on, and regular snapshots."""
    events = pb.BlockEvents(restart=True, stored=blocks)
    for group, need in enumerate(needs[1:], 1):
        first = need.first_block(len(blocks), block_size)
        early = blocks[SNAPSHOT_BLOCKS - 1 : first : SNAPSHOT_BLOCKS] if need.kind == "state" else []
        events.more.add(group=group, stored=early + blocks[first:])
    return events


REPORTED = 10
"""Load reports between two decisions: as of 2,000 frames and 200 requests in a second."""


class _Nobody:
    """A watcher that must not be called."""

    def __getattr__(self, name: str) -> object:
        raise AssertionError(name)


def client(number: int, profile: Profile) -> WorkerClient:
    """Return a client as after its greeting. One in three prefills."""
    made = WorkerClient(f"10.0.{number // 256}.{number % 256}:9000", "timing", cast(Watcher, _Nobody()))
    made.hello = pb.WorkerHello(
        role=pb.ROLE_PREFILL if number % 3 == 0 else pb.ROLE_DECODE,
        block_size=profile.block_size,
        num_blocks=profile.num_blocks,
        max_running=profile.max_running,
        tells_blocks=True,
        chunk_tokens=profile.chunk_tokens,
        mixed_prefill_tokens=profile.mixed_tokens,
        kv_bytes_per_token=profile.kv_bytes_per_token,
    )
    return made


def random_load(draw: random.Random, profile: Profile) -> pb.Load:
    return pb.Load(
        running=draw.randrange(100),
        waiting_prefill_tokens=draw.randrange(20_000),
        blocks_free=draw.randrange(2000),
        blocks_held=1000,
        submits_taken=0,
        prefill_tokens_per_s=profile.tokens_per_s * draw.uniform(0.9, 1.1),
        step_base_ms=1e3 * profile.base_s * draw.uniform(0.9, 1.1),
        step_row_ms=1e3 * profile.row_s,
        handoff_bytes_per_s=profile.link_bytes_per_s,
    )


# --- the memory of the index


def memory(console: Console) -> None:
    """Print the index's bytes for each distinct block, when each is held by one worker, and when one in four
    is held by a second."""
    table = Table(title="The index of blocks", title_justify="left")
    for column in ("workers", "blocks", "bytes each", "one in four held twice", "us to store one"):
        table.add_column(column, justify="right")
    for workers in (64, 1000):
        each, seconds = index_bytes(workers, 0)
        twice, _ = index_bytes(workers, 4)
        cells = (each, twice, seconds * 1e6)
        table.add_row(f"{workers}", f"{BLOCKS}", *(f"{value:.1f}" for value in cells))
    console.print(table)


BLOCKS = 400_000


def index_bytes(workers: int, every: int) -> tuple[float, float]:
    draw = random.Random(workers)
    tracemalloc.start()
    index = PrefixIndex()
    numbers = [index.add_worker() for _ in range(workers)]
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(0, BLOCKS, 100):
        hashes = [draw.getrandbits(64) for _ in range(100)]
        index.store(draw.choice(numbers), hashes)
        if every:
            index.store(draw.choice(numbers), hashes[::every])
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    fresh = PrefixIndex()
    number = fresh.add_worker()
    hashes = [draw.getrandbits(64) for _ in range(BLOCKS)]
    began = time.perf_counter()
    fresh.store(number, hashes)
    return taken / BLOCKS, (time.perf_counter() - began) / BLOCKS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0, help="of each trace, in simulated time")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of " + ", ".join(PARTS))
    chosen = parser.parse_args()
    parts = chosen.parts.split(",")
    for part in parts:
        if part not in PARTS:
            parser.error(f"--parts: there is no {part!r}; allowed: {', '.join(PARTS)}")
    console = Console(width=150)
    checks = Checks(console)
    if "sharing" in parts:
        sharing(chosen.seconds, console, checks)
    if "conditional" in parts:
        conditional(chosen.seconds, console, checks)
    if "decisions" in parts:
        decisions(console, checks)
    if "memory" in parts:
        memory(console)
    return 1 if checks.failed else 0


if __name__ == "__main__":
    sys.exit(main())
