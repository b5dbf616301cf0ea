"""The speed of quantized checkpoints on a CPU against the same weights in bfloat16, and against llama.cpp.

    python -m loadtest.quantized_speed [--shape qwen-0.5b] [--sequences 1,8] [--rounds 5]
    python3 -m venv .llama && .llama/bin/pip install llama-cpp-python gguf
    python -m loadtest.quantized_speed --llama .llama/bin/python

Engines without a server have the same random weights: bfloat16, FP8 in blocks of 128 x 128, int8 and fp8 of
each row, INT4 in groups of 128; llama.cpp has them in Q8_0 and Q4_0, which it makes of a GGUF of 16 bits.
All answer in turns, with all cores: prompts of 512 tokens, then 64 tokens of each sequence. A figure is the
median over the rounds, and a ratio the median of each round's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType

from rich.console import Console
from rich.table import Table

from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.models.quantization.registry import Quantization
from loadtest.conditions import conditions
from loadtest.cpu_steps import Clock, steps
from loadtest.resident import FORMS, save_quantized
from loadtest.shapes import SHAPES, save_random

INPUT_LEN, OUTPUT_LEN = 512, 64
AGAINST: Mapping[str, str] = MappingProxyType(
    {"int8": "q8_0", "fp8": "q8_0", "fp8 rows": "q8_0", "int4": "q4_0"}
)
"""What of llama.cpp has as many bits."""


@dataclass(frozen=True)
class Seconds:
    """What one round took: the prompts of a sequence, and a step in which all decode."""

    prompt: float
    decode: float


Answer = Callable[[int], Seconds]
"""A function that computes with so many sequences at once."""


def engine_answer(engine: Engine, count: int) -> Seconds:
    prompts, decode = steps(engine, Clock(), count, INPUT_LEN, OUTPUT_LEN)
    return Seconds(prompts.step / count, decode.step)


def engine_of(path: Path, quantization: Quantization, threads: int) -> Engine:
    return Engine.from_config(
        EngineConfig(
            model=path,
            dtype="bfloat16",
            num_threads=threads,
            kv_cache_bytes=256 << 20,
            prefix_caching=False,
            quantization=quantization,
        )
    )


@dataclass
class LlamaCpp:
    """llama.cpp in a process of its own."""

    process: subprocess.Popen[str] = field(repr=False)

    @classmethod
    def started(
        cls, python: Path, checkpoint: Path, folder: Path, threads: int, stack: ExitStack
    ) -> LlamaCpp:
        command = [str(python), "-m", "loadtest.llama_cpp_steps", str(checkpoint), str(folder), str(threads)]
        process = stack.enter_context(
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                cwd=Path(__file__).parents[1],
            )
        )
        stack.callback(process.kill)
        found = cls(process)
        if found._line() != "ready":
            raise SystemExit(f"llama.cpp did not start: run {' '.join(command)}")
        return found

    def answer(self, kind: str, count: int) -> Seconds:
        question = {"kind": kind, "sequences": count, "input_len": INPUT_LEN, "output_len": OUTPUT_LEN}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        told = json.loads(self._line())
        return Seconds(told["prompts"] / count, told["decode"])

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


def measured(answers: Mapping[str, Answer], count: int, rounds: int) -> dict[str, list[Seconds]]:
    """What each took in each round; in all rounds they take turns. A round before is not counted."""
    found: dict[str, list[Seconds]] = {name: [] for name in answers}
    for round_number in range(rounds + 1):
        for name, answer in answers.items():
            seconds = answer(count)
            if round_number:
                found[name].append(seconds)
    return found


def ratio(of: list[Seconds], to: list[Seconds], part: str) -> str:
    """The median of how many times as fast the former are."""
    times = [getattr(other, part) / getattr(one, part) for one, other in zip(of, to, strict=True)]
    return f"{statistics.median(times):.2f}"


def table(title: str, found: Mapping[str, list[Seconds]]) -> Table:
    columns = ("", "decode step, ms", "x bf16", "x llama.cpp", "prompt, ms", "x bf16", "x llama.cpp")
    made = Table(*columns, title=title, title_justify="left")
    for name, rounds in found.items():
        cells = [name]
        for part in ("decode", "prompt"):
            milliseconds = statistics.median(getattr(each, part) for each in rounds) * 1e3
            peer = found.get(AGAINST.get(name, ""))
            cells += [
                f"{milliseconds:.1f}",
                ratio(rounds, found["bf16"], part),
                "" if peer is None else ratio(rounds, peer, part),
            ]
        made.add_row(*cells)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", default="qwen-0.5b", choices=SHAPES)
    parser.add_argument("--sequences", default="1,8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--llama", type=Path, help="a Python with llama-cpp-python and gguf; of Qwen2 shapes")
    chosen = parser.parse_args()
    console = Console(width=120)
    for line in conditions("loadtest.quantized_speed"):
        console.print(line, soft_wrap=True)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        plain = save_random(folder / "bf16", SHAPES[chosen.shape])
        kept: dict[str, tuple[Path, Quantization]] = {
            "bf16": (plain, "auto"),
            "fp8": (save_quantized(plain, folder / "fp8", FORMS["fp8"]), "auto"),
            "fp8 rows": (plain, "fp8"),
            "int8": (plain, "int8"),
            "int4": (save_quantized(plain, folder / "int4", FORMS["int4"]), "auto"),
        }
        answers: dict[str, Answer] = {
            name: partial(engine_answer, engine_of(*each, chosen.threads)) for name, each in kept.items()
        }
        if chosen.llama is not None:
            peer = LlamaCpp.started(chosen.llama, plain, folder, chosen.threads, stack)
            answers |= {kind: partial(peer.answer, kind) for kind in ("q8_0", "q4_0")}
        for count in map(int, chosen.sequences.split(",")):
            found = measured(answers, count, chosen.rounds)
            console.print(table(f"{chosen.shape}, {count} at once, {chosen.threads} threads", found))


if __name__ == "__main__":
    main()
