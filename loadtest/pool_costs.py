"""What scheduler and pool cost the host a step, in this source tree and in one before it, in turns.

    git worktree add --detach ../before COMMIT
    python -m loadtest.pool_costs --before ../before [--rows 1,64,256,512] [--rounds 6] [--restarts 3]

The engine is that of ``loadtest.host_steps``: its model keeps the KV of one group, and its device computes
nothing. Rows of 1,024 tokens and more decode; a round is 128 steps, which take two blocks of 64 tokens for
each row. ``schedule`` is the scheduler with the pool; ``schedule to apply`` adds the step's tensors and what
follows a token, ``whole`` draws and frames as well: processor time of the host's thread for a step.

A request has 1,024 tokens of prompt and two of answer; its figure is the processor time from its acceptance
to its end, of eight at once, divided by eight. ``cold``: nobody sent the prompt before; ``warm``: the prefix
cache knows it.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import count
from pathlib import Path

from rich.console import Console

from baton.core.sampling_params import ResolvedSampling
from baton.engine.engine import Engine
from baton.engine.sequence import Sequence
from loadtest.conditions import conditions
from loadtest.host_steps import BLOCK_SIZE, CONTEXT, TimedDevice, empty_engine, engine_of, phases
from loadtest.trees import tree
from loadtest.two_trees import ANSWER, Figures, Question, answer, compare, table

STEPS = 2 * BLOCK_SIZE
MOST_ROUNDS = 40 * BLOCK_SIZE // (STEPS + 8) - 2
"""The rounds, without the warm-up, that the rows have blocks for."""
AT_ONCE = 8
TIMES = 4
"""How often a round sends requests."""


class Costs:
    """Answers questions of a decode step of some rows, or of requests where there are no rows."""

    def __init__(self) -> None:
        self._engines: dict[int, tuple[Engine, TimedDevice]] = {}
        self._numbers = count()

    def answer(self, question: Question) -> Figures:
        rows = int(question["rows"])
        if rows not in self._engines:
            device = TimedDevice()
            engine = engine_of(rows, device) if rows else empty_engine(AT_ONCE, device)
            self._engines[rows] = engine, device
        engine, device = self._engines[rows]
        if rows:
            return _step(engine, device)
        found = [self._requests(engine) for _ in range(TIMES)]
        return {name: sum(one[name] for one in found) / TIMES for name in found[0]}

    def _requests(self, engine: Engine) -> Figures:
        params = ResolvedSampling(max_tokens=2, temperature=0, ignore_eos=True)
        begin = next(self._numbers) * AT_ONCE
        prompts = [[begin + row, *range(CONTEXT - 1)] for row in range(AT_ONCE)]
        found: dict[str, float] = {}
        for kind in ("cold", "warm"):
            began = time.thread_time()
            for row, prompt in enumerate(prompts):
                engine.add(Sequence(f"{kind}-{begin + row}", 1, prompt, params, owner="router"))
            while engine.has_work:
                engine.step()
            found[f"{kind} request"] = (time.thread_time() - began) / AT_ONCE
        return found


def _step(engine: Engine, device: TimedDevice) -> Figures:
    found = phases(engine, device, STEPS)
    own = found["schedule"] + found["prepare"] + found["apply"]
    return {"schedule": found["schedule"], "schedule to apply": own, "whole": found["whole"]}


def parse() -> argparse.Namespace:
    """Parse the options; a wrong one ends the program with a line about it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--before", type=tree, required=True, help="the source tree to compare with")
    parser.add_argument("--rows", default="1,64,256,512")
    parser.add_argument("--rounds", type=int, default=6, help="after each start")
    parser.add_argument("--restarts", type=int, default=3)
    chosen = parser.parse_args()
    if not 1 <= chosen.rounds <= MOST_ROUNDS:
        parser.error(f"--rounds is {chosen.rounds}; allowed: 1 to {MOST_ROUNDS}, as rows have no more blocks")
    return chosen


def main() -> None:
    if sys.argv[1:] == [ANSWER]:
        answer(Costs().answer)
        return
    chosen = parse()
    before: Path = chosen.before
    console = Console(width=120)
    for line in conditions("loadtest.pool_costs"):
        console.print(line, soft_wrap=True)
    questions: dict[str, Question] = {f"{rows} rows": {"rows": int(rows)} for rows in chosen.rows.split(",")}
    questions["requests"] = {"rows": 0}
    found = compare("loadtest.pool_costs", before, questions, chosen.rounds, chosen.restarts)
    console.print(table("scheduler and pool, processor time", found))


if __name__ == "__main__":
    main()
