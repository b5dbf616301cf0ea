"""A measurement in two source trees in turns: a process of each, which answers one question at a time.

The processes stay, so nothing is loaded twice; who goes first changes from round to round. After some
rounds both begin anew, as luck with memory's pages stays with a process. A ratio is the median of the rounds'
ratios.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

import baton
from loadtest.trees import HERE, python_path

ANSWER = "--answer"
"""The option of a process that answers."""
BEFORE, AFTER = "before", "after"
Question = Mapping[str, int | str]
Figures = Mapping[str, float]
"""Names and their seconds."""
Pairs = dict[str, list[tuple[float, float]]]
"""(before, after) of each round, by figure."""


@dataclass(frozen=True)
class Side:
    """A process that runs one tree's Baton."""

    process: subprocess.Popen[str]

    def ask(self, question: Question) -> Figures:
        """Raises RuntimeError if the process ends."""
        assert self.process.stdin is not None
        print(json.dumps(question), file=self.process.stdin, flush=True)
        return {name: float(value) for name, value in self.read().items()}

    def read(self) -> dict[str, float | str]:
        """Read one line of the process. Raises RuntimeError if it ends."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args!r} ended with {self.process.wait()}")
        found: dict[str, float | str] = json.loads(line)
        return found


@contextmanager
def side(module: str, tree: Path) -> Iterator[Side]:
    """Start ``module`` of this tree over the Baton of ``tree``. RuntimeError if that is not what it runs."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, ANSWER],
        cwd=HERE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((python_path(tree), str(HERE)))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        started = Side(process)
        runs = str(started.read()["runs"])
        if not Path(runs).is_relative_to(tree):
            raise RuntimeError(f"the process of {tree} runs {runs}")
        yield started
    finally:
        process.kill()
        process.communicate()


def answer(work: Callable[[Question], Figures]) -> None:
    """Answer the questions on standard input, a line each, until it closes."""
    print(json.dumps({"runs": str(Path(baton.__file__).resolve())}), flush=True)
    for line in sys.stdin:
        print(json.dumps(work(json.loads(line))), flush=True)


def compare(
    module: str, before: Path, questions: Mapping[str, Question], rounds: int, restarts: int
) -> dict[str, Pairs]:
    """Ask both trees ``rounds`` times after each of ``restarts`` starts. The first answers to a question are
    warm-up. Returns the figures by question."""
    found: dict[str, Pairs] = {case: {} for case in questions}
    for restart in range(restarts):
        with ExitStack() as stack:
            sides = {
                BEFORE: stack.enter_context(side(module, before)),
                AFTER: stack.enter_context(side(module, HERE)),
            }
            for case, question in questions.items():
                for name in sides:
                    sides[name].ask(question)
                for number in range(rounds):
                    order = sorted(sides, reverse=(number + restart) % 2 == 1)
                    told = {name: sides[name].ask(question) for name in order}
                    for figure, seconds in told[BEFORE].items():
                        found[case].setdefault(figure, []).append((seconds, told[AFTER][figure]))
    return found


def table(title: str, found: Mapping[str, Pairs]) -> Table:
    """Return a table of milliseconds: medians, the ratio, and the middle half of the rounds' ratios."""
    shown = Table(title=title, title_justify="left")
    for column in ("case", "figure", "before, ms", "after, ms", "ratio", "middle half"):
        shown.add_column(column, justify="right")
    for case, pairs in found.items():
        for figure, rounds in pairs.items():
            old, new = (statistics.median(column) for column in zip(*rounds, strict=True))
            ratios = [after / before for before, after in rounds]
            low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
            cells = (f"{old * 1e3:.4g}", f"{new * 1e3:.4g}", f"{middle:.3f}", f"{low:.3f} {high:.3f}")
            shown.add_row(case, figure, *cells)
    return shown
