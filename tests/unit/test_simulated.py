"""A worker without a model: its tokens hang on every word of the pool, and its times on its profile."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import typer.main
from hypothesis import given
from hypothesis import strategies as st

from baton.cli.main import commands
from baton.core.sampling_params import ResolvedSampling
from baton.engine.engine import Engine
from baton.engine.kv.block_pool import BlockPool
from baton.engine.scheduler import Scheduler, SchedulerLimits
from baton.engine.sequence import Fork, Sequence
from baton.process.options import ConfigError
from baton.simulated.config import DEFAULT_BLOCKS, SimulatedConfig
from baton.simulated.faults import FaultOptions, Faults, parse_faults
from baton.simulated.link import PacedEnd, WordMemory
from baton.simulated.profile import PROFILES, Profile, profile_of
from baton.simulated.runner import FACTOR, SimulatedRunner, chained
from baton.transport.base import GroupPart
from baton.transport.ranks.endpoint import LocalEndpoint
from baton.transport.ranks.shard import KVShard
from baton.transport.staging import Staging
from baton.transport.tcp import TcpConnector
from baton.worker.config import WorkerConfig
from tests.support.fake_engine import run
from tests.support.simulated import simulated_answer

INSTANT = PROFILES["instant"]


def simulated_engine(
    num_blocks: int = 64, profile: Profile = INSTANT, faults: Faults | None = None, **limits: object
) -> Engine:
    """Answers are of the ids 50 to 99; 7 is the end of an answer."""
    fields = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "prefill_chunk": 16, "max_model_len": 512}
    runner = SimulatedRunner(profile, num_blocks, 4, range(50, 100), frozenset({7}), faults)
    scheduler = Scheduler(SchedulerLimits(**{**fields, **limits}), BlockPool(num_blocks, 4))  # type: ignore[arg-type]
    return Engine(runner, scheduler, frozenset({7}), 100)


def truth(prompt: list[int], length: int, seed: int = 0) -> list[int]:
    return simulated_answer(prompt, length, 100, seed=seed, first=50)


@given(st.integers(0, 2**64 - 1), st.lists(st.integers(0, 2**31), min_size=1, max_size=100))
def test_words_of_a_chunk_are_those_of_its_tokens_one_by_one(word: int, token_ids: list[int]) -> None:
    expected: list[int] = []
    for token in token_ids:
        word_after = ((expected[-1] if expected else word) * FACTOR + token + 1) % 2**64
        expected.append(word_after)
    assert chained(word, token_ids).tolist() == expected


@pytest.mark.parametrize("num_blocks", [64, 14])
def test_batching_chunks_shared_prefixes_and_preemption_change_no_token(num_blocks: int) -> None:
    engine = simulated_engine(num_blocks, max_num_batched_tokens=12, prefill_chunk=5)
    prompts = [[*range(1, 14), number] for number in range(3)]
    params = ResolvedSampling(max_tokens=16, temperature=0, seed=0)
    sequences = [Sequence(str(i), 0, prompt, params) for i, prompt in enumerate(prompts)]
    assert run(engine, *sequences) == [truth(prompt, 16) for prompt in prompts]
    assert (engine.scheduler.counters.preemptions > 0) == (num_blocks == 14)


def test_forks_branch_off_with_their_seeds() -> None:
    params = ResolvedSampling(max_tokens=9, temperature=1, seed=5)
    fork = Fork("b", ResolvedSampling(max_tokens=9, temperature=1, seed=6))
    engine = simulated_engine()
    engine.add(Sequence("a", 0, [1, 2, 3, 4, 5], params, forks=(fork,)))
    told: dict[str, list[int]] = {"a": [], "b": []}
    while engine.has_work:
        for output in engine.step():
            told[output.seq.request_id] += output.new_tokens
    assert told == {"a": truth([1, 2, 3, 4, 5], 9, seed=5), "b": truth([1, 2, 3, 4, 5], 9, seed=6)}


def test_answers_end_by_chance_as_long_as_they_should_be_on_average() -> None:
    engine = simulated_engine(1024, Profile(step_base_ms=0, prefill_ms_per_1k=0, mean_output_tokens=20))
    params = ResolvedSampling(max_tokens=400, temperature=1, seed=1)
    sequences = [Sequence(str(i), 0, [1 + i // 90, 2 + i % 90], params) for i in range(300)]
    lengths = [len(outputs) for outputs in run(engine, *sequences, max_steps=100_000)]
    assert 17 < np.mean(lengths) < 23  # the mean of 300 such has a deviation of 1.1


def test_a_step_takes_what_the_profile_says() -> None:
    profile = Profile(step_base_ms=20, step_row_ms=2, context_ms_per_1k=1000, prefill_ms_per_1k=1000)
    assert profile.step_s(3, 5, 7) == pytest.approx(0.020 + 0.006 + 0.005 + 0.007)
    engine = simulated_engine(profile=profile)
    engine.add(Sequence("a", 0, list(range(1, 11)), ResolvedSampling(max_tokens=2, temperature=0)))
    for least in (0.030, 0.032):  # ten tokens of prompt; one row over ten of context
        began = time.monotonic()
        engine.step()
        assert least <= time.monotonic() - began < least + 0.1


def test_what_needs_probabilities_is_refused_by_name() -> None:
    engine = simulated_engine()
    with pytest.raises(ValueError, match="logprobs: a simulated worker has no log-probabilities"):
        engine.add(Sequence("a", 0, [1, 2], ResolvedSampling(max_tokens=2, logprobs=1)))


def test_an_error_rate_ends_requests_and_nothing_else() -> None:
    engine = simulated_engine(faults=Faults(FaultOptions(error_rate=0.2, seed=1)))
    for i in range(40):
        engine.add(Sequence(str(i), 0, [1, 2, i], ResolvedSampling(max_tokens=4, temperature=0)))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    failed = [output for output in outputs if output.error is not None]
    assert 10 < len(failed) < 35
    assert engine.stats().blocks.held == 0


def test_slow_times_come_and_go() -> None:
    faults = Faults(FaultOptions(slow_mean_s=0.01, slow_s=0.05, slow_factor=4, seed=3))
    seen: set[float] = set()
    end = time.monotonic() + 2
    while time.monotonic() < end and len(seen) < 2:
        seen.add(faults.stretched(1.0))
        time.sleep(0.002)
    assert seen == {1.0, 4.0}


def test_profiles_and_faults_are_checked_by_name(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    file.write_text('{"step_base_ms": 3.5}')
    assert profile_of(str(file)) == Profile(step_base_ms=3.5)
    for content, problem in (
        ('{"step_base_ms": -1}', "step_base_ms must be 0 or more, not -1"),
        ('{"link_bytes_per_s": 0}', "link_bytes_per_s must be more than 0, not 0"),
        ('{"step_base_ms": "x"}', "Expected `float`"),
    ):
        file.write_text(content)
        with pytest.raises(ConfigError, match=problem):
            profile_of(str(file))
    with pytest.raises(ConfigError, match="'h200' is none of 8b-h100, 8b-l4, instant, and no file"):
        profile_of("h200")
    assert parse_faults(["die-mean-s=5", "seed=2"]) == FaultOptions(die_mean_s=5, seed=2)
    for one, problem in (
        ("die", "write name=figure"),
        ("x=1", "with one of"),
        ("seed=q", "'q' is not a number"),
    ):
        with pytest.raises(ConfigError, match=problem):
            parse_faults([one])


def test_what_a_simulation_has_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="--connector: must be auto or tcp"):
        SimulatedConfig(worker=WorkerConfig(role="both", connector="ucx"))
    with pytest.raises(ConfigError, match="one process"):
        SimulatedConfig(worker=WorkerConfig(role="both", tensor_parallel_size=2))


def test_the_pool_of_words_is_moved_by_wire_blocks() -> None:
    pool = np.arange(32, dtype=np.uint64).reshape(4, 8)
    part = WordMemory(pool).part(4)
    copy = bytearray(2 * part.form_of([0]).nbytes)
    part.gather((5, 0), memoryview(copy))
    assert np.frombuffer(copy, np.uint64).tolist() == [20, 21, 22, 23, 0, 1, 2, 3]
    assert b"".join(part.in_place((5, 0))) == bytes(copy)
    part.scatter((1, 2), memoryview(copy))
    assert pool[0, 4:].tolist() == [20, 21, 22, 23]
    assert pool[1, :4].tolist() == [0, 1, 2, 3]
    for blocks in ((), (8,), (-1,)):
        with pytest.raises(ValueError, match="ids of 0 to 7"):
            part.in_place(blocks)
    with pytest.raises(ValueError, match="does not divide"):
        WordMemory(pool).part(3)
    with pytest.raises(ValueError, match="heads"):
        WordMemory(pool).part(4, [GroupPart(range(2), range(1))])


async def test_links_of_a_worker_share_what_it_can_send() -> None:
    memory = WordMemory(np.zeros((2, 4), np.uint64))
    connectors = {"tcp": TcpConnector(Staging(), lambda: None)}
    local = LocalEndpoint(connectors, memory, KVShard.of_one(range(1), range(1)))
    end = PacedEnd(local, bytes_per_token=100, bytes_per_s=1000.0)
    assert end.reserve(500) == pytest.approx(0.5, abs=0.01)
    assert end.reserve(500) == pytest.approx(1.0, abs=0.01)
    await end.close()


def test_the_help_tells_a_simulations_own_defaults() -> None:
    command = typer.main.get_command(commands).commands["worker-sim"]  # type: ignore[attr-defined]
    told = {param.name: param.help for param in command.params}
    assert told["num_blocks"].endswith(f"Default: {DEFAULT_BLOCKS}.")
    assert "CUDA" not in told["mixed_prefill_tokens"]
