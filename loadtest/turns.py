"""Engines asked in turns: the figures of each round, and the table that compares them.

Every engine is up all the time and stands still while another is asked. The engine that goes first changes
from round to round, and each round's prompts are its own, the same for all engines. Figures are medians over
the rounds; a ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.table import Table

from baton.bench.config import ServeConfig
from baton.bench.serve import serve
from baton.bench.spread import Spread
from baton.bench.summary import Summary
from baton.bench.workload.config import WorkloadConfig
from loadtest.engines import Engine

Figures = Mapping[str, float]
"""Figures by name, with the unit in the name."""
Ask = Callable[[str, int], Figures]
"""A function that asks the engine at an address, with the prompts of a seed."""


@dataclass(frozen=True)
class Load:
    """A closed loop: the lengths of its requests, and how many run at once."""

    input_len: int
    output_len: int
    concurrency: int
    requests: int

    def __str__(self) -> str:
        return f"{self.input_len}/{self.output_len}, {self.concurrency} at once"


@dataclass(frozen=True)
class Round:
    """A case, asked of one engine after the other."""

    case: str
    figures: Mapping[str, Figures]
    """The figures by engine."""


def take_turns(
    case: str, engines: Mapping[str, Engine], ask: Ask, repeats: int, seeds: Iterator[int]
) -> Iterator[Round]:
    """Yield ``repeats`` rounds, each with a seed of its own, so that no prompt is in a prefix cache
    already."""
    names = list(engines)
    for repeat in range(repeats):
        order = names[repeat % len(names) :] + names[: repeat % len(names)]
        seed = next(seeds)
        yield Round(case, {name: ask_one(engines[name], ask, seed) for name in order})


def ask_one(engine: Engine, ask: Ask, seed: int) -> Figures:
    """Ask the engine while it is awake."""
    with engine.awake() as url:
        return ask(url, seed)


def ask_loop(model: Path, load: Load, url: str, seed: int) -> Figures:
    """Run one closed loop. Raises RuntimeError if a request fails: figures of a part would be no
    comparison."""
    config = ServeConfig(
        workload=WorkloadConfig(
            num_prompts=load.requests, input_len=load.input_len, output_len=load.output_len, seed=seed
        ),
        url=url,
        tokenizer=str(model),
        max_concurrency=load.concurrency,
    )
    summary = serve(config, lambda line: None).summary
    if summary.errors or summary.output_tokens != load.requests * load.output_len:
        raise RuntimeError(f"{url}: {summary}")
    return figures_of(summary)


def figures_of(summary: Summary) -> Figures:
    """Return the figures of a loop in which every request was answered."""
    return {
        "output tokens/s": summary.output_tokens_per_s,
        "TTFT median, ms": found(summary.ttft).median * 1e3,
        "TPOT median, ms": found(summary.tpot).median * 1e3,
        "ITL p99, ms": found(summary.itl).p99 * 1e3,
    }


def found(spread: Spread | None) -> Spread:
    """Return ``spread``, which must have values."""
    assert spread is not None
    return spread


def closed_loops(
    engines: Mapping[str, Engine], model: Path, load: Load, repeats: int, seeds: Iterator[int]
) -> Iterator[Round]:
    """Yield rounds of one load, after each engine has answered a few tokens of it."""
    few = Load(load.input_len, 4, load.concurrency, load.concurrency)
    seed = next(seeds)
    for engine in engines.values():
        ask_one(engine, partial(ask_loop, model, few), seed)
    return take_turns(str(load), engines, partial(ask_loop, model, load), repeats, seeds)


def table(title: str, rounds: Sequence[Round], ours: str, theirs: str) -> Table:
    """Return a table with a row for each case and figure; the ratio is that of ``ours`` to ``theirs``."""
    shown = Table(title=title, title_justify="left")
    for column in ("case", "figure", ours, theirs, "ratio", "ratios of the rounds"):
        shown.add_column(column, justify="right")
    for row in rows(rounds, ours, theirs):
        shown.add_row(*row)
    return shown


def rows(rounds: Sequence[Round], ours: str, theirs: str) -> list[tuple[str, ...]]:
    """Return the table's cells."""
    found: list[tuple[str, ...]] = []
    for case in dict.fromkeys(one.case for one in rounds):
        of_case = [one.figures for one in rounds if one.case == case]
        for figure in of_case[0][ours]:
            pairs = [(one[ours][figure], one[theirs][figure]) for one in of_case]
            medians = [statistics.median(values) for values in zip(*pairs, strict=True)]
            ratios = sorted(our / their for our, their in pairs)
            found.append(
                (
                    case,
                    figure,
                    *(f"{value:.1f}" for value in medians),
                    f"{statistics.median(ratios):.2f}",
                    " ".join(f"{ratio:.2f}" for ratio in ratios),
                )
            )
    return found
