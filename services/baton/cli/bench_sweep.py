"""``baton bench sweep``: searches, shows and writes."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from baton.bench.config import ServeConfig
from baton.bench.document import write_document
from baton.bench.serve import load_tokenizer
from baton.bench.sweep.candidate import RingCandidate, RoleSplit
from baton.bench.sweep.config import SearchConfig
from baton.bench.sweep.plot import plot_sweep
from baton.bench.sweep.run import Sweep
from baton.bench.sweep.score import Comparison, Score
from baton.bench.sweep.table import sweep_table, verdict
from baton.bench.sweep.trial import TrialRunner
from baton.cli.bench_ring import LocalRings


def run_sweep(
    search: SearchConfig,
    rings: LocalRings,
    load: ServeConfig,
    json: Path | None,
    plot: Path | None,
) -> None:
    """Raises ConfigError when the time is too short, UserError when the defaults cannot be measured."""
    plan = search.plan(_defaults(search, rings), _cores(), _places(search, rings))
    tokenizer = load_tokenizer(load.tokenizer or rings.worker.model)
    print(
        f"{len(plan.chosen())} of {len(plan.candidates)} candidates and the defaults, {search.minutes:g} "
        f"minutes; goodput: {100 * search.attainment:g} % of requests within {load.goals}"
    )
    runner = TrialRunner(load, tokenizer, search.attainment)
    scores = asyncio.run(Sweep(plan, rings, runner, print).run())
    Console().print(sweep_table(scores))
    found = Comparison.of(scores)
    print(*verdict(found), rings.command(found.chosen.candidate), sep="\n")
    if json is not None:
        _write(json, search, rings, load, scores)
    if plot is not None:
        plot_sweep(plot, scores, load.goals, f"{rings.worker.model_name}, {load.workload.workload}")


def _defaults(search: SearchConfig, rings: LocalRings) -> RingCandidate:
    """What ``baton up`` starts when it is told nothing."""
    from baton.bench.offline.devices import sizes_on

    split, sizes = RoleSplit(prefill=1, decode=1), sizes_on(rings.devices[0], rings.worker)
    threads = max(1, (search.cores or _cores()) // split.workers)
    return RingCandidate(
        split, threads, sizes.max_num_seqs, sizes.max_num_batched_tokens, sizes.prefill_chunk
    )


def _places(search: SearchConfig, rings: LocalRings) -> int:
    """How many workers there is room for: one to a device, or to a core where there is only the CPU."""
    on_cpu = all(device == "cpu" for device in rings.devices)
    return (search.cores or _cores()) if on_cpu else len(rings.devices)


def _write(
    path: Path, search: SearchConfig, rings: LocalRings, load: ServeConfig, scores: Sequence[Score]
) -> None:
    settings = {
        "search": asdict(search),
        "goals": asdict(load.goals),
        "workload": asdict(load.workload),
        "burstiness": load.burstiness,
    }
    found = [
        {
            **asdict(score),
            "name": str(score.candidate),
            "goodput": score.goodput,
            "goodput_range": score.goodput_range,
            "rounds": score.last_round + 1,
            "command": rings.command(score.candidate),
        }
        for score in scores
    ]
    chosen = rings.command(Comparison.of(scores).chosen.candidate)
    write_document(path, "sweep", settings=settings, best=chosen, candidates=found)


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
