"""The parts of a step's time on a CPU: matmuls, attention, and the rest of the engine.

    python -m loadtest.cpu_steps [--models llama-125m,qwen-0.5b] [--sequences 1,8,32] [--dtype float32]
        [--quantization int8]

One engine without a server: prompts of 512 tokens, then 64 tokens of each. Figures are medians over the steps
in which every sequence decodes; for the prompts, the sum of the steps before. The bytes of a decode step are
those of the weights but the embedding, and of K and V, each once.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from baton.core.sampling_params import ResolvedSampling
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.runner import ModelRunner
from baton.engine.sequence import Sequence
from baton.models.config import ModelConfig
from baton.models.quantization.registry import SCHEMES
from baton_kernels.cpu.layers import NativeStep
from baton_kernels.cpu.library import Native, native
from baton_kernels.cpu.linear import PackedWeight
from loadtest.cpu_kernels import read_bandwidth
from loadtest.shapes import SHAPES, save_random

KERNELS = {"linear": "matmul", "decode": "attention", "prefill": "attention"}
BYTES = {"bfloat16": 2, "float32": 4}


@dataclass
class Clock:
    """The time in the kernels of each kind, in seconds."""

    spent: dict[str, float] = field(default_factory=lambda: {"matmul": 0.0, "attention": 0.0})

    def timed(self, kind: str, kernel: Callable[..., None]) -> Callable[..., None]:
        def call(*args: object) -> None:
            began = time.perf_counter()
            kernel(*args)
            self.spent[kind] += time.perf_counter() - began

        return call

    def timed_layers(self, kernel: Callable[..., None]) -> Callable[..., None]:
        """Wrap a kernel of many layers, which reports the time of each kind itself."""

        def call(*args: int) -> None:
            *_, step, _ = args  # and the number of threads
            seconds = (ctypes.c_double * 2)()
            NativeStep.from_address(step).seconds = ctypes.addressof(seconds)
            kernel(*args)
            self.spent["matmul"] += seconds[0]
            self.spent["attention"] += seconds[1]

        return call


@contextmanager
def clocked(kernels: Native) -> Iterator[Clock]:
    clock, plain = Clock(), dict(vars(kernels))
    for name, kind in KERNELS.items():
        setattr(kernels, name, clock.timed(kind, plain[name]))
    vars(kernels)["layers"] = clock.timed_layers(plain["layers"])
    try:
        yield clock
    finally:
        vars(kernels).update(plain)


@dataclass(frozen=True)
class Spent:
    """The time of one step, in seconds."""

    step: float
    matmul: float
    attention: float

    @property
    def rest(self) -> float:
        return self.step - self.matmul - self.attention


def steps(engine: Engine, clock: Clock, count: int, input_len: int, output_len: int) -> tuple[Spent, Spent]:
    """Return the time of the prompts of ``count`` sequences together, and of the median step in which all
    decode."""
    params = ResolvedSampling(max_tokens=output_len, temperature=0, ignore_eos=True)
    rng = random.Random(count)
    largest = min(4000, engine.vocab_size)
    prompts = ([rng.randrange(largest) for _ in range(input_len)] for _ in range(count))
    sequences = [Sequence(f"{count}-{i}", 0, prompt, params) for i, prompt in enumerate(prompts)]
    for sequence in sequences:
        engine.add(sequence)
    prompt_steps, decode_steps = [], []
    while engine.has_work:
        decodes = all(sequence.output_ids for sequence in sequences)
        before, began = dict(clock.spent), time.perf_counter()
        outputs = engine.step()
        spent = Spent(
            time.perf_counter() - began,
            clock.spent["matmul"] - before["matmul"],
            clock.spent["attention"] - before["attention"],
        )
        if not decodes:
            prompt_steps.append(spent)
        elif len(outputs) == count:
            decode_steps.append(spent)
    middle = sorted(decode_steps, key=lambda spent: spent.step)[len(decode_steps) // 2]
    whole = Spent(
        sum(s.step for s in prompt_steps),
        sum(s.matmul for s in prompt_steps),
        sum(s.attention for s in prompt_steps),
    )
    return whole, middle


def weight_bytes(engine: Engine) -> int:
    """Return the bytes of the weights that every step reads."""
    assert isinstance(engine.runner, ModelRunner)
    model = engine.runner.model
    assert isinstance(model, nn.Module)
    held = (value for module in model.modules() for value in vars(module).values())
    return sum(value.nbytes for value in held if isinstance(value, PackedWeight))


def measure(name: str, path: Path, chosen: argparse.Namespace, bandwidth: float) -> Table:
    config = ModelConfig.from_dir(path)
    dtype, threads, repeats = chosen.dtype, chosen.threads, chosen.repeats
    engine = Engine.from_config(
        EngineConfig(
            model=path,
            dtype=dtype,
            num_threads=threads,
            kv_cache_bytes=2 << 30,
            prefix_caching=False,
            quantization=chosen.quantization,
        )
    )
    kernels = native()
    assert kernels is not None, "there is nothing to measure without a compiler"
    read = weight_bytes(engine)
    of_token = config.num_layers * config.num_kv_heads * config.head_dim * 2
    title = f"{name}, {dtype}, quantization {chosen.quantization}, {threads} threads"
    table = Table(title=title, title_justify="left")
    columns = (
        "sequences",
        "decode step, ms",
        "matmul",
        "attention",
        "rest",
        "rest's share",
        "of read bandwidth",
    )
    for column in (*columns, "512 tokens of prompt, ms", "matmul", "attention", "rest"):
        table.add_column(column, justify="right")
    for count in map(int, chosen.sequences.split(",")):
        with clocked(kernels) as clock:
            found = [steps(engine, clock, count, 512, 64) for _ in range(repeats)]
        prompts = sorted((prompt for prompt, _ in found), key=lambda s: s.step)[repeats // 2]
        decode = sorted((step for _, step in found), key=lambda s: s.step)[repeats // 2]
        share = statistics.median(step.rest / step.step for _, step in found)
        rate = (read + count * 544 * of_token * BYTES[dtype]) / decode.step
        table.add_row(
            str(count),
            *(f"{x * 1e3:.1f}" for x in (decode.step, decode.matmul, decode.attention, decode.rest)),
            f"{share:.0%}",
            f"{rate / bandwidth:.2f}",
            *(
                f"{x / count * 1e3:.0f}"
                for x in (prompts.step, prompts.matmul, prompts.attention, prompts.rest)
            ),
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", default="llama-125m,qwen-0.5b")
    parser.add_argument("--directory", type=Path, help="where models are kept; default: a temporary one")
    parser.add_argument("--sequences", default="1,8,32")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", choices=BYTES, default="bfloat16")
    parser.add_argument("--quantization", choices=SCHEMES, default="none")
    chosen = parser.parse_args()
    console = Console(width=160)
    torch.set_num_threads(chosen.threads)
    bandwidth = read_bandwidth()
    console.print(f"memory read: {bandwidth / 1e9:.1f} GB/s")
    with tempfile.TemporaryDirectory() as scratch:
        for name in chosen.models.split(","):
            path = save_random((chosen.directory or Path(scratch)) / name, SHAPES[name])
            console.print(measure(name, path, chosen, bandwidth))


if __name__ == "__main__":
    main()
