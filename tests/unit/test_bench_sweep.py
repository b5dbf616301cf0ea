"""``baton bench sweep`` with rings that are servers in this process, quick or slow by their settings."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from baton.bench.config import ServeConfig, WorkloadConfig
from baton.bench.goals import Goals
from baton.bench.plots import plot_sweep
from baton.bench.serve import load_tokenizer
from baton.bench.sweep import halving, trial
from baton.bench.sweep.candidate import Candidate, Grid, Split
from baton.bench.sweep.config import SearchConfig
from baton.bench.sweep.plan import SweepPlan
from baton.bench.sweep.run import Sweep
from baton.bench.sweep.trial import TrialRunner
from baton.bench.tables import verdict
from baton.cli.bench_ring import LocalRings
from baton.options import ConfigError, StartError, UserError
from baton.worker.config import WorkerConfig
from tests.support.api_server import serving_app
from tests.support.fake_openai import FakeServer
from tests.support.patience import undisturbed

DEFAULT = Candidate(Split(1, 1), 1, 4, 512, 256)
QUICK = Candidate(Split(both=1), 2, 4, 512, 128)
SLOW = Candidate(Split(both=1), 2, 4, 512, 256)
BROKEN = Candidate(Split(both=2), 1, 4, 512, 128)
SECONDS = {DEFAULT: 0.3, QUICK: 0.03, SLOW: 0.4}
"""To the first token."""
GOALS = Goals(ttft=0.2)


class FakeRings:
    """Remembers which rings it started, and that there was only one at a time."""

    def __init__(self, broken: Candidate = BROKEN) -> None:
        self.started: list[Candidate] = []
        self._broken = broken
        self._running = 0

    @asynccontextmanager
    async def running(self, candidate: Candidate) -> AsyncIterator[str]:
        assert self._running == 0
        self.started.append(candidate)
        if candidate == self._broken:
            raise StartError("no room for it")
        self._running += 1
        try:
            async with serving_app(FakeServer([(SECONDS[candidate], 1), (0.01, 1)]).app()) as url:
                yield url
        finally:
            self._running -= 1


def sweep_of(rings: FakeRings, *candidates: Candidate, seconds: float) -> Sweep:
    load = WorkloadConfig(input_len=4, output_len=2)
    runner = TrialRunner(ServeConfig(workload=load, goals=GOALS), load_tokenizer("demo"), attainment=0.7)
    plan = SweepPlan(default=DEFAULT, candidates=candidates, seconds=seconds, least_slot=0.9)
    return Sweep(plan, rings, runner, lambda line: None)


@undisturbed
async def test_the_best_settings_win_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Fewer and longer probes than in earnest, as the whole has to be over soon.
    monkeypatch.setattr(halving, "REPEATS", 2)
    monkeypatch.setattr(trial, "PROBES", 3)
    rings = FakeRings()
    began = time.monotonic()
    scores = await sweep_of(rings, BROKEN, SLOW, QUICK, seconds=18).run()
    assert time.monotonic() - began < 18 + 3
    best = scores[0]
    assert best.candidate == QUICK
    assert best.goodput > 0
    by_candidate = {score.candidate: score for score in scores}
    assert by_candidate[DEFAULT].goodput == by_candidate[SLOW].goodput == 0
    assert by_candidate[BROKEN].failure == "no room for it"
    # All once, then the two that are left again, with the defaults in every turn.
    assert rings.started[:4] == [DEFAULT, BROKEN, SLOW, QUICK]
    assert rings.started[4:] == [DEFAULT, QUICK, SLOW] * 2
    assert verdict(scores) == "best, in every trial of the last round better than the defaults:"
    plot_sweep(tmp_path / "s.svg", scores, GOALS, "a sweep")
    assert (tmp_path / "s.svg").stat().st_size > 1000


async def test_defaults_that_do_not_start_end_it() -> None:
    with pytest.raises(UserError, match="the defaults cannot be measured: no room for it"):
        await sweep_of(FakeRings(broken=DEFAULT), QUICK, seconds=8).run()


def test_too_little_time_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"--minutes: must be at least 3\.0, not 2"):
        SweepPlan(default=DEFAULT, candidates=[QUICK], seconds=120).chosen()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"minutes": 0}, "--minutes: must be above 0, not 0"),
        ({"attainment": 1.5}, "--attainment: must be above 0, at most 1, not 1.5"),
        ({"splits": "1p"}, "--splits: '1p' is no split; write it like 1p1d, 2p1d or 2b"),
        ({"prefill_chunk": "64,"}, "--prefill-chunk: '64,' is no list"),
        ({"cores": 0}, "--cores: must be at least 1, not 0"),
    ],
)
def test_bad_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SearchConfig(**options)  # type: ignore[arg-type]


def test_settings_that_leave_nothing_are_an_error() -> None:
    search = SearchConfig(max_num_seqs="512", max_num_batched_tokens="256")
    with pytest.raises(ConfigError, match="--max-num-batched-tokens: no combination is left"):
        search.plan(DEFAULT, cores=2, places=2)


def test_the_command_is_that_of_the_ring() -> None:
    rings = LocalRings(WorkerConfig(role="both", dtype="float32", block_size=32), ["auto"])
    assert rings.command(DEFAULT) == (
        "baton up --dtype float32 --block-size 32 --prefill 1 --decode 1 --max-num-seqs 4 "
        "--max-num-batched-tokens 512 --prefill-chunk 256 --threads-per-worker 1"
    )


def test_the_grid_counts_what_it_combines() -> None:
    grid: Grid = SearchConfig(splits="1p1d,2b", max_num_seqs="8,8").grid(places=2)
    assert grid.splits == [Split(1, 1), Split(both=2)]
    assert grid.max_num_seqs == [8]
