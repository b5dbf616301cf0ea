"""``baton bench sweep`` with rings that are servers in this process, quick or slow by their settings."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from baton.bench.config import ServeConfig
from baton.bench.goals import Goals
from baton.bench.serve import load_tokenizer
from baton.bench.sweep import halving, trial
from baton.bench.sweep.candidate import Grid, RingCandidate, RoleSplit
from baton.bench.sweep.config import SearchConfig
from baton.bench.sweep.plan import SweepPlan
from baton.bench.sweep.plot import plot_sweep
from baton.bench.sweep.run import Sweep
from baton.bench.sweep.score import Comparison, Probe, Score, Trial
from baton.bench.sweep.table import verdict
from baton.bench.sweep.trial import TrialRunner
from baton.bench.workload.config import WorkloadConfig
from baton.cli.bench_ring import LocalRings
from baton.process.options import ConfigError, StartError, UserError
from baton.worker.config import WorkerConfig
from tests.support.api_server import serving_app
from tests.support.fake_openai import FakeServer
from tests.support.patience import undisturbed

DEFAULT = RingCandidate(RoleSplit(1, 1), 1, 4, 512, 256)
QUICK = RingCandidate(RoleSplit(both=1), 2, 4, 512, 128)
SLOW = RingCandidate(RoleSplit(both=1), 2, 4, 512, 256)
BROKEN = RingCandidate(RoleSplit(both=2), 1, 4, 512, 128)
SECONDS = {DEFAULT: 0.3, QUICK: 0.03, SLOW: 0.4}
"""To the first token."""
GOALS = Goals(ttft=0.2)


class FakeRings:
    """Remembers which rings it started, and that there was only one at a time."""

    def __init__(self, broken: RingCandidate = BROKEN) -> None:
        self.started: list[RingCandidate] = []
        self._broken = broken
        self._running = 0

    @asynccontextmanager
    async def running(self, candidate: RingCandidate) -> AsyncIterator[str]:
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


def sweep_of(rings: FakeRings, *candidates: RingCandidate, seconds: float) -> Sweep:
    load = WorkloadConfig(input_len=4, output_len=2)
    runner = TrialRunner(ServeConfig(workload=load, goals=GOALS), load_tokenizer("demo"), attainment=0.7)
    plan = SweepPlan(default=DEFAULT, candidates=candidates, seconds=seconds, min_slot=0.9)
    return Sweep(plan, rings, runner, lambda line: None)


@pytest.mark.deep
@undisturbed
async def test_the_best_settings_win_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Fewer and longer probes than in earnest, as the whole has to be over soon.
    monkeypatch.setattr(halving, "REPEATS", 3)
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
    # All once, then the one that is left against the defaults, in alternating turns.
    assert rings.started[:4] == [DEFAULT, BROKEN, SLOW, QUICK]
    assert rings.started[4:] == [DEFAULT, QUICK, QUICK, DEFAULT, DEFAULT, QUICK]
    found = Comparison.of(scores)
    assert found.chosen.candidate == QUICK
    assert verdict(found)[-1] == "better than the defaults, every trial above their best:"
    plot_sweep(tmp_path / "s.svg", scores, GOALS, "a sweep")
    assert (tmp_path / "s.svg").stat().st_size > 1000


def score_of(candidate: RingCandidate, goodputs: list[float], round_: int = 1) -> Score:
    """In one trial before the last round and those of ``goodputs`` in ``round_``."""
    probes = [Probe(goodput, 10, 1.0, True, 0.1, 0.01, 50.0) for goodput in goodputs]
    trials = [Trial(0, (probes[0],)), *(Trial(round_, (probe,)) for probe in probes)]
    return Score(candidate, candidate == DEFAULT, tuple(trials))


@pytest.mark.parametrize(
    ("winner", "default", "chosen", "conclusion"),
    [
        ([12, 14, 13], [9, 11, 10], QUICK, "better than the defaults, every trial above their best (1.30 t"),
        # Its median is higher, and so is each trial than the one beside it; but not beyond the spread.
        ([12, 16, 13], [9, 14, 10], DEFAULT, "defaults: nothing was better beyond the spread of the trials:"),
        ([8, 9, 9], [9, 11, 10], DEFAULT, "defaults: nothing was better beyond the spread of the trials:"),
        ([12, 14], [9, 11, 10], DEFAULT, "defaults: no other setting was measured often enough in the last"),
        ([0, 0, 0], [0, 0, 0], DEFAULT, "defaults: no setting met the goals at any rate that was tried:"),
    ],
)
def test_only_what_is_better_beyond_the_spread_takes_the_place_of_the_defaults(
    winner: list[float], default: list[float], chosen: RingCandidate, conclusion: str
) -> None:
    scores = [score_of(QUICK, winner), score_of(DEFAULT, default), score_of(SLOW, [99], round_=0)]
    found = Comparison.of(sorted(scores, key=lambda score: score.rank, reverse=True))
    assert found.chosen.candidate == chosen
    said = verdict(found)
    assert said[-1].startswith(conclusion)
    medians = [f"median {sorted(of)[len(of) // 2]:.2f}" for of in (winner, default) if len(of) == 3]
    assert all(any(median in line for line in said) for median in medians)


def test_a_winner_that_only_ran_earlier_is_not_compared() -> None:
    scores = [score_of(DEFAULT, [9, 11, 10], round_=1), score_of(QUICK, [99, 99, 99], round_=0)]
    found = Comparison.of(scores)
    assert found.winner is None
    assert found.chosen.candidate == DEFAULT


async def test_defaults_that_do_not_start_end_it() -> None:
    with pytest.raises(UserError, match="the defaults cannot be measured: no room for it"):
        await sweep_of(FakeRings(broken=DEFAULT), QUICK, seconds=9.5).run()


async def test_a_ring_that_there_was_no_time_to_measure_has_no_goodput(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sweep = sweep_of(FakeRings(), QUICK, seconds=9.5)
    monkeypatch.setattr(trial, "_SHORTEST", math.inf)  # as if the ring had started at the last moment
    with pytest.raises(UserError, match="the defaults cannot be measured: the ring started too late"):
        await sweep.run()


def test_too_little_time_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"--minutes: must be at least 5\.0, not 2"):
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
    assert grid.splits == [RoleSplit(1, 1), RoleSplit(both=2)]
    assert grid.max_num_seqs == [8]
