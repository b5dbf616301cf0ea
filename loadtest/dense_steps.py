"""Steps of dense models in this source tree and in one before it, in turns: what has become slower?

    git worktree add --detach ../before COMMIT
    python -m loadtest.dense_steps --before ../before [--models llama-125m] [--sequences 1,8] [--rounds 5]

Each tree has an engine without a server, as ``loadtest.cpu_steps`` has: prompts of 512 tokens, then 64 tokens
of each. A round's figures are the median step in which all sequences decode, and all steps before, divided by
the sequences.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from loadtest.conditions import conditions
from loadtest.cpu_steps import Clock, steps
from loadtest.shapes import SHAPES, save_random
from loadtest.trees import tree
from loadtest.two_trees import ANSWER, Figures, Question, answer, compare, table

INPUT_LEN, OUTPUT_LEN = 512, 64


class DenseSteps:
    """Answers questions of the steps of one model."""

    def __init__(self) -> None:
        self._engines: dict[str, Engine] = {}

    def answer(self, question: Question) -> Figures:
        path, count = str(question["model"]), int(question["sequences"])
        if path not in self._engines:
            self._engines = {path: _engine(Path(path), int(question["threads"]))}
        prompts, decode = steps(self._engines[path], Clock(), count, INPUT_LEN, OUTPUT_LEN)
        return {"decode step": decode.step, "512 tokens of prompt": prompts.step / count}


def _engine(path: Path, threads: int) -> Engine:
    settings = EngineConfig(
        model=path, dtype="bfloat16", num_threads=threads, kv_cache_bytes=1 << 30, prefix_caching=False
    )
    return Engine.from_config(settings)


def main() -> None:
    if sys.argv[1:] == [ANSWER]:
        answer(DenseSteps().answer)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--before", type=tree, required=True, help="the source tree to compare with")
    parser.add_argument("--models", default="llama-125m")
    parser.add_argument("--directory", type=Path, help="where models are kept; default: a temporary one")
    parser.add_argument("--sequences", default="1,8")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5, help="after each start")
    parser.add_argument("--restarts", type=int, default=3)
    chosen = parser.parse_args()
    console = Console(width=120)
    for line in conditions("loadtest.dense_steps"):
        console.print(line, soft_wrap=True)
    with tempfile.TemporaryDirectory() as scratch:
        for name in chosen.models.split(","):
            path = save_random((chosen.directory or Path(scratch)) / name, SHAPES[name])
            questions: dict[str, Question] = {
                f"{count} at once": {"model": str(path), "sequences": int(count), "threads": chosen.threads}
                for count in chosen.sequences.split(",")
            }
            found = compare("loadtest.dense_steps", chosen.before, questions, chosen.rounds, chosen.restarts)
            console.print(table(f"{name}, bfloat16", found))


if __name__ == "__main__":
    main()
