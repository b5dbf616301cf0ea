"""What the host spends on a step, and how much of it a device hides.

    python -m loadtest.host_steps [--rows 1,64,256,512] [--device-ms 6,10,25] [--steps 60] [--repeats 5]

The engine is the one that serves; its device is a clock. A step is scheduled, laid out, its draws are packed,
its tokens are read, applied and made into a frame for the router, but nothing is computed: the device takes a
given time for each step, one after the other, and answers with the same token for everybody. What launching
kernels costs is not in the figures.

The first table has the processor time of the host's thread for a step (median over repeats of the mean over
steps), with a device that takes no time. The second has the time of a step with a device that takes a while,
launched ahead and one after the other, interleaved: ``exposed`` is what a step takes beyond the device's own
time.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from baton.core.sampling_params import ResolvedSampling
from baton.engine.engine import Engine
from baton.engine.execution import Sampled, StepResult
from baton.engine.kv.block_pool import BlockPool
from baton.engine.sampling.sampler import Packer, packed
from baton.engine.scheduler import ScheduledBatch, Scheduler, SchedulerLimits
from baton.engine.sequence import Sequence
from baton.engine.step_inputs import StepBuilder, StepInputs
from baton.engine.token_choice import draws_of
from baton.simulated.profile import Profile
from baton.simulated.runner import SimulatedRunner
from baton.v1 import worker_pb2
from baton.worker.service import delta_of

BLOCK_SIZE = 64
CONTEXT = 1024
CPU = torch.device("cpu")
SPIN_S = 3e-4
"""The part of a wait that is spent looking at the clock: a sleep is not that exact."""


class TimedStep:
    """A step on a device that takes a given time for it."""

    def __init__(self, device: TimedDevice, inputs: StepInputs) -> None:
        self._device = device
        self._due = inputs.due
        self.places: dict[Sequence, int] = {}
        device.free_at = max(time.perf_counter(), device.free_at) + device.step_s
        self._over_at = device.free_at

    def choose(self) -> None:
        draws = draws_of(self._due)
        packed(draws.params, draws.positions, CPU, self._device.packer)
        self.places = draws.places(self._due)

    def result(self) -> StepResult:
        left = self._over_at - time.perf_counter()
        if left > SPIN_S:
            time.sleep(left - SPIN_S)
        while time.perf_counter() < self._over_at:
            pass
        token = Sampled(7, None)
        return StepResult(tokens={seq: [token] for seq in self._due})


class TimedDevice:
    """``baton.engine.execution.Launcher`` whose steps take ``step_s`` seconds, one after the other."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self.free_at = 0.0
        self.packer = Packer()
        self._builder = StepBuilder(BLOCK_SIZE, CPU, with_lengths=False)
        self._newest: TimedStep | None = None

    def launch(self, batch: ScheduledBatch) -> TimedStep:
        places = self._newest.places if self._newest is not None else {}
        self._newest = TimedStep(self, self._builder.build(batch, places, every_row=False))
        return self._newest

    def run(self, batch: ScheduledBatch) -> StepResult:
        step = self.launch(batch)
        step.choose()
        return step.result()


def empty_engine(rows: int, device: TimedDevice) -> Engine:
    """An engine for ``rows`` sequences at once, of which each may have ``CONTEXT`` tokens and 40 blocks."""
    limits = SchedulerLimits(
        max_num_seqs=rows,
        max_num_batched_tokens=1 << 20,
        prefill_chunk=1 << 20,
        max_model_len=1 << 17,
        prefix_caching=True,
    )
    num_blocks = rows * (CONTEXT // BLOCK_SIZE + 40)
    runner = SimulatedRunner(Profile(), num_blocks, BLOCK_SIZE, range(100), frozenset())
    runner.run = device.run  # type: ignore[method-assign]
    return Engine(runner, Scheduler(limits, BlockPool(num_blocks, BLOCK_SIZE)), frozenset({2}), 128_256)


def engine_of(rows: int, device: TimedDevice) -> Engine:
    """An engine in which ``rows`` sequences of ``CONTEXT`` tokens decode."""
    engine = empty_engine(rows, device)
    params = ResolvedSampling(max_tokens=1 << 16, temperature=0.8, top_p=0.95, seed=1)
    for number in range(rows):
        prompt = [(number * 31 + at) % 997 for at in range(CONTEXT)]
        engine.add(Sequence(f"request-{number}", 1, prompt, params, owner="router"))
    engine.step()
    return engine


def publish(engine: Engine) -> int:
    """One step and its frame for the router. The bytes of the frame."""
    frame = worker_pb2.Frame()
    for output in engine.step():
        frame.deltas.append(delta_of(output))
    return len(frame.SerializeToString())


def seconds_per_step(engine: Engine, device: TimedDevice, ahead: bool, step_s: float, steps: int) -> float:
    while engine.computing:
        engine.runner.launcher = None
        engine.step()
    engine.runner.launcher = device if ahead else None
    device.step_s = step_s
    publish(engine)
    began = time.perf_counter()
    for _ in range(steps):
        publish(engine)
    return (time.perf_counter() - began) / steps


def phases(engine: Engine, device: TimedDevice, steps: int) -> dict[str, float]:
    """The mean seconds of a step's phases, each measured around the call that makes it."""
    spent: dict[str, float] = {}

    def timed(name: str, owner: object, method: str) -> None:
        inner = getattr(owner, method)

        def wrapped(*args: object, **kwargs: object) -> object:
            began = time.thread_time()
            try:
                return inner(*args, **kwargs)
            finally:
                spent[name] = spent.get(name, 0.0) + time.thread_time() - began

        setattr(owner, method, wrapped)

    timed("schedule", engine.scheduler, "schedule")
    timed("prepare", device._builder, "build")
    timed("apply", engine, "_apply")
    seconds_per_step(engine, device, False, 0.0, 3)
    spent.clear()
    began = time.thread_time()
    seconds_per_step(engine, device, False, 0.0, steps)
    count = steps + 1
    whole = (time.thread_time() - began) / count
    found = {name: spent[name] / count for name in ("schedule", "prepare", "apply")}
    for owner, method in ((engine.scheduler, "schedule"), (device._builder, "build"), (engine, "_apply")):
        delattr(owner, method)
    return {**found, "draws, publish, rest": whole - sum(found.values()), "whole": whole}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what the host spends on a step.")
    parser.add_argument("--rows", default="1,64,256,512")
    parser.add_argument("--device-ms", default="6,10,25")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    alone, beside = Table(title="host, ms a step"), Table(title="with a device, ms a step")
    for name in ("rows", "schedule", "prepare", "apply", "draws, publish, rest", "whole"):
        alone.add_column(name, justify="right")
    for name in ("rows", "device", "one by one", "ahead", "exposed", "of the device's rate"):
        beside.add_column(name, justify="right")
    for rows in map(int, args.rows.split(",")):
        device = TimedDevice()
        engine = engine_of(rows, device)
        runs = [phases(engine, device, args.steps) for _ in range(args.repeats)]
        alone.add_row(str(rows), *(f"{1e3 * median(run[name] for run in runs):.3f}" for name in runs[0]))
        for device_ms in map(float, args.device_ms.split(",")):
            step_s = device_ms / 1e3
            times: dict[bool, list[float]] = {False: [], True: []}
            for _ in range(args.repeats):
                for ahead in times:
                    times[ahead].append(seconds_per_step(engine, device, ahead, step_s, args.steps))
            one, two = median(times[False]), median(times[True])
            beside.add_row(
                str(rows),
                f"{device_ms:g}",
                f"{1e3 * one:.3f}",
                f"{1e3 * two:.3f}",
                f"{1e3 * (two - step_s):.3f}",
                f"{step_s / two:.3f}",
            )
    console = Console()
    console.print(alone)
    console.print(beside)


if __name__ == "__main__":
    main()
