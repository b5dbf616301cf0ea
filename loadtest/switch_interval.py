"""What the engine's thread and the event loop of a worker cost each other: they share one interpreter.

    python -m loadtest.switch_interval [--rows 64,256] [--step-ms 6,12,25] [--intervals 5,1,0.2,0.05]

A worker of role both with its real services and a runner whose forward pass sleeps, as for a device; the
other end of its stream is a process of its own. The interpreter's switch interval changes from window to
window of one run, in turns, so that other work on the machine falls on all alike. In the windows "alone",
outputs are dropped, so that the event loop has nothing to do. Figures are medians over steps, in ms: what a
step takes beyond the forward pass; of that, what the engine's thread computes itself; and how late the event
loop wakes from a sleep of 1 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
import time
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from functools import partial

import grpc
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from baton.core.sampling_params import ResolvedSampling
from baton.engine.engine import Engine, SequenceOutput
from baton.net.heartbeat import TEMPO
from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc as pb_grpc
from baton_kernels.paged import PagedBatch
from tests.support.fake_engine import fake_engine
from tests.support.greetings import greet_worker
from tests.support.local_worker import KEY, LocalWorker, SlowModel

SETTLE_S = 1.5
"""The time from the last request until steps count: all are decoding then."""
ALONE = 0.0
"""The key of the windows in which outputs are dropped."""
PROMPT = list(range(1, 17))
PARAMS = ResolvedSampling(max_tokens=100_000, temperature=0.8, seed=1, ignore_eos=True)


class SleepingModel(SlowModel):
    """Sleeps as long as a device computes, and yields the same logits for every row."""

    def forward(self, token_ids: Tensor, batch: PagedBatch, pool: Tensor) -> Tensor:
        time.sleep(self.step_s)
        rows = len(token_ids) if batch.wanted is None else len(batch.wanted.rows)
        return torch.zeros(rows, 1, dtype=torch.int64)


@dataclass
class Steps:
    """An engine's steps as they are taken, each with its time and the time that its thread computed."""

    engine: Engine
    forward_s: float
    muted: bool = False
    """Whether outputs are dropped."""
    beyond_ms: list[float] = field(default_factory=list)
    computed_ms: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._step = self.engine.step
        self.engine.step = self.step  # type: ignore[method-assign]

    def step(self) -> list[SequenceOutput]:
        began, began_thread = time.perf_counter(), time.thread_time()
        outputs = self._step()
        self.beyond_ms.append(1e3 * (time.perf_counter() - began - self.forward_s))
        self.computed_ms.append(1e3 * (time.thread_time() - began_thread))
        if self.muted:
            self.engine.work.set()  # or the loop would wait, as it does after a step without outputs
            return []
        return outputs

    def clear(self) -> None:
        self.beyond_ms.clear()
        self.computed_ms.clear()


@dataclass
class Window:
    """The figures of one setting, of all its windows."""

    beyond_ms: list[float] = field(default_factory=list)
    computed_ms: list[float] = field(default_factory=list)
    late_ms: list[float] = field(default_factory=list)

    def take(self, steps: Steps, late_ms: Items[float]) -> None:
        self.beyond_ms += steps.beyond_ms
        self.computed_ms += steps.computed_ms
        self.late_ms += late_ms

    def cells(self) -> list[str]:
        nineties = [statistics.quantiles(self.beyond_ms, n=10)[-1]]
        medians = [statistics.median(part) for part in (self.beyond_ms, self.computed_ms)]
        late = [statistics.median(self.late_ms)] if self.late_ms else []
        cells = [f"{figure:.2f}" for figure in (medians[0], *nineties, medians[1], *late)]
        return [*cells, *[""] * (4 - len(cells)), str(len(self.beyond_ms))]


def engine_of(rows: int, model: SlowModel) -> Engine:
    return fake_engine(
        rows * 256,
        64,
        max_num_seqs=rows,
        max_num_batched_tokens=2048,
        prefill_chunk=2048,
        max_model_len=16_000,
        model=model,
    )


async def beside(
    rows: int, step_s: float, intervals_ms: Items[float], seconds: float, rounds: int
) -> dict[float, Window]:
    """The figures of a worker at each switch interval; at ``ALONE``, with the usual one and no outputs."""
    tempo = replace(TEMPO, busy_silence_s=3600.0, idle_silence_s=3600.0)
    make_model: type[SlowModel] = SleepingModel
    worker = LocalWorker(
        "both", step_s=step_s, make_engine=partial(_engine, rows), make_model=make_model, tempo=tempo
    )
    await worker.start()
    arguments = ("-m", __name__ if __name__ != "__main__" else "loadtest.switch_interval")
    client = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, "--client", worker.address, "--rows", str(rows)
    )
    steps = Steps(worker.engine, step_s)
    windows = {interval: Window() for interval in (ALONE, *intervals_ms)}
    before = sys.getswitchinterval()
    try:
        while len(worker.engine.scheduler.running) < rows:  # noqa: ASYNC110 - of another thread
            await asyncio.sleep(0.05)
        await asyncio.sleep(SETTLE_S)
        for _, interval in itertools.product(range(rounds), windows):
            sys.setswitchinterval(interval / 1e3 or before)
            steps.muted = interval == ALONE
            await asyncio.sleep(0.1)
            steps.clear()
            windows[interval].take(steps, await _lateness(seconds / rounds))
    finally:
        sys.setswitchinterval(before)
        client.kill()
        await client.wait()
        await worker.stop()
    return windows


def _engine(rows: int, model: SlowModel) -> Engine:
    return engine_of(rows, model)


async def _lateness(seconds: float) -> list[float]:
    """How much later than asked for the event loop woke, in ms."""
    late = []
    until = time.perf_counter() + seconds
    while (began := time.perf_counter()) < until:
        await asyncio.sleep(1e-3)
        late.append(1e3 * (time.perf_counter() - began) - 1)
    return late


async def read_frames(address: str, rows: int) -> None:
    """Asks a worker for ``rows`` answers and reads them, as a router does."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = pb_grpc.WorkerStub(channel).Connect(None)
        await greet_worker(call, KEY, "measuring")
        for number in range(rows):
            submit = pb.Submit(request_id=f"{number}", prompt_ids=PROMPT, params=PARAMS.to_proto())
            await call.write(pb.RouterMessage(submit=submit))
        while isinstance(await call.read(), pb.WorkerMessage):
            pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", default="64,256", help="sequences that decode")
    parser.add_argument("--step-ms", default="6,12,25", help="time of the forward pass")
    parser.add_argument("--intervals", default="5,1,0.2,0.05", help="switch intervals to compare, in ms")
    parser.add_argument("--seconds", type=float, default=6.0, help="for each setting")
    parser.add_argument("--rounds", type=int, default=4, help="windows of each setting, in turns")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    rows = [int(text) for text in chosen.rows.split(",")]
    if chosen.client:
        asyncio.run(read_frames(chosen.client, rows[0]))
        return
    torch.set_num_threads(1)
    intervals = [float(text) for text in chosen.intervals.split(",")]
    columns = ("rows", "forward", "interval", "beyond", "p90", "computed", "loop late", "steps")
    table = Table(*columns, title="ms; medians over steps", title_justify="left")
    for count, step_ms in itertools.product(rows, map(float, chosen.step_ms.split(","))):
        windows = asyncio.run(beside(count, step_ms / 1e3, intervals, chosen.seconds, chosen.rounds))
        for interval, window in windows.items():
            name = "alone" if interval == ALONE else f"{interval:g}"
            table.add_row(str(count), f"{step_ms:g}", name, *window.cells())
    Console().print(table)


if __name__ == "__main__":
    main()
