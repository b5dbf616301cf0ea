"""Engines asked in turns: the figures of each round, and the table that compares them.

Every engine serves all the time and stands still while another is asked. The engine that goes first changes
from round to round, and each round's prompts are its own, the same for all engines. Figures are medians over
the rounds; a ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from baton.bench.config import ServeConfig, WorkloadConfig
from baton.bench.serve import serve
from baton.bench.spread import Spread
from baton.bench.summary import Summary

Figures = Mapping[str, float]
"""Name with its unit → value."""
Ask = Callable[[int], Figures]
"""Asks one engine, with the prompts of a seed."""


@dataclass(frozen=True)
class Load:
    """What is asked for in a closed loop, and how many at once."""

    input_len: int
    output_len: int
    concurrency: int
    requests: int

    def __str__(self) -> str:
        return f"{self.input_len}/{self.output_len}, {self.concurrency} at once"


@dataclass(frozen=True)
class Round:
    """One case, asked of one engine after the other."""

    case: str
    figures: Mapping[str, Figures]
    """Engine → its figures."""


def take_turns(case: str, engines: Mapping[str, Ask], repeats: int, seeds: Iterator[int]) -> Iterator[Round]:
    """``repeats`` rounds; a seed for each, so that what a prefix cache knows is of no use to the next."""
    names = list(engines)
    for repeat in range(repeats):
        order = names[repeat % len(names) :] + names[: repeat % len(names)]
        seed = next(seeds)
        yield Round(case, {name: engines[name](seed) for name in order})


def ask(url: str, model: Path, load: Load, seed: int) -> Summary:
    """One closed loop. RuntimeError if a request fails: figures of a part would be no comparison."""
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
    return summary


def figures_of(summary: Summary) -> Figures:
    """Of a loop in which every request was answered."""
    return {
        "output tokens/s": summary.output_tokens_per_s,
        "TTFT median, ms": found(summary.ttft).median * 1e3,
        "TPOT median, ms": found(summary.tpot).median * 1e3,
        "ITL p99, ms": found(summary.itl).p99 * 1e3,
    }


def found(spread: Spread | None) -> Spread:
    """What there is a value of."""
    assert spread is not None
    return spread


def closed_loops(
    urls: Mapping[str, str], model: Path, load: Load, repeats: int, seeds: Iterator[int]
) -> Iterator[Round]:
    """Rounds of one load, after an engine has answered a few tokens of it."""

    def asking(url: str) -> Ask:
        return lambda seed: figures_of(ask(url, model, load, seed))

    seed = next(seeds)
    for url in urls.values():
        ask(url, model, Load(load.input_len, 4, load.concurrency, load.concurrency), seed)
    yield from take_turns(str(load), {name: asking(url) for name, url in urls.items()}, repeats, seeds)


def table(title: str, rounds: Sequence[Round], ours: str, theirs: str) -> Table:
    """A row for each case and figure; the ratio is that of ``ours`` to ``theirs``."""
    shown = Table(title=title, title_justify="left")
    for column in ("case", "figure", ours, theirs, "ratio", "ratios of the rounds"):
        shown.add_column(column, justify="right")
    for row in rows(rounds, ours, theirs):
        shown.add_row(*row)
    return shown


def rows(rounds: Sequence[Round], ours: str, theirs: str) -> list[tuple[str, ...]]:
    """The table's cells."""
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
