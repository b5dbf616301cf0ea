"""A model split over real rank processes: every feature of the engine once, and how ranks end."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

import baton.engine.graphs
import baton.parallel.processes
from baton import LLM, SamplingParams, StructuredOutputs
from baton.engine import startup
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.graphs import GraphedModel, graph_sizes
from baton.parallel.ranks import RankError
from tests.support.replaying_rank import Remembered, Remembering
from tests.support.runners import runner_of
from tests.support.tiny_models import TINY_MODELS, oracle_greedy, save_llama

NEW_TOKENS = 24
MIN_MARGIN = 1e-3
"""Between the best and the second-best logit: what sums in another order may not turn."""

PROMPT = list(range(60, 95))
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "num_blocks": 24,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "prefill_chunk": 32,
    "num_threads": 1,
}


def llm_of(path: Path, **options: Any) -> LLM:
    return LLM(str(path), **(OPTIONS | options))


def prompts_for(path: Path, lengths: tuple[int, ...], seed: int = 0) -> list[tuple[list[int], list[int]]]:
    """(prompt, what transformers answers) of each length; none whose answer hangs on a hair."""
    rng = random.Random(seed)
    drawn = []
    for length in lengths:
        margin = 0.0
        while margin < MIN_MARGIN:
            prompt = [rng.randrange(250) for _ in range(length)]
            answer, margin = oracle_greedy(path, prompt, NEW_TOKENS)
        drawn.append((prompt, answer))
    return drawn


def check_parity(llm: LLM, path: Path, lengths: tuple[int, ...], seed: int = 0) -> None:
    drawn = prompts_for(path, lengths, seed)
    results = llm.generate([prompt for prompt, _ in drawn], GREEDY, progress=False)
    for result, (_, answer) in zip(results, drawn, strict=True):
        assert list(result.outputs[0].token_ids) == answer


def gone(pids: list[int], within_s: float) -> bool:
    """Whether no such process is left, or becomes so."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if not any(psutil.pid_exists(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("models") / "uneven", vocab_size=323, intermediate_size=113)


@pytest.fixture(scope="module")
def whole(path: Path) -> LLM:
    return llm_of(path)


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    llm = llm_of(path, tensor_parallel_size=2, host_kv_bytes=1 << 22)
    yield llm
    pids = ranks_of(llm)
    llm.close()
    assert gone(pids, 0.1)


class TestTensorParallel:
    """All on one engine of two ranks, beside one that is not split."""

    @pytest.mark.deep
    def test_chunks_batches_and_preemption(self, llm: LLM, path: Path) -> None:
        preemptions = llm.engine.stats().scheduler.preemptions
        check_parity(llm, path, (1, 5, 16, 17, 90, 150, 200))
        check_parity(llm, path, (30,) * 8)
        assert llm.engine.stats().scheduler.preemptions > preemptions

    def test_the_prefix_cache(self, llm: LLM, path: Path) -> None:
        [(prompt, answer)] = prompts_for(path, (70,), seed=1)
        for expected_cached in (0, 64):
            [result] = llm.generate([prompt], GREEDY, progress=False)
            assert list(result.outputs[0].token_ids) == answer
            assert result.cached_tokens == expected_cached

    @pytest.mark.deep
    def test_the_host_tier(self, llm: LLM, path: Path) -> None:
        scheduler = llm.engine.scheduler
        assert scheduler.tier is not None
        scheduler.tier.break_even.copying_pays = lambda blocks: True  # type: ignore[method-assign]
        [(prompt, answer)] = prompts_for(path, (100,), seed=2)
        for _ in range(2):
            before = llm.engine.stats().host_tier
            [result] = llm.generate([prompt], GREEDY, progress=False)
            assert list(result.outputs[0].token_ids) == answer
            check_parity(llm, path, (200, 200, 200), seed=3)  # the pool is theirs now
        after = llm.engine.stats().host_tier
        assert result.cached_tokens == 96
        assert after.blocks.restored - before.blocks.restored >= 6
        assert after.copied.saved == after.blocks.saved * 2 * 3 * 2 * 16 * 16 * 4  # of both ranks

    def test_forks_and_seeds(self, llm: LLM, whole: LLM) -> None:
        params = SamplingParams(temperature=0.8, seed=7, max_tokens=20, n=3, ignore_eos=True)
        split, one = (each.generate([PROMPT], params, progress=False)[0] for each in (llm, whole))
        assert [o.token_ids for o in split.outputs] == [o.token_ids for o in one.outputs]
        assert len({o.token_ids for o in split.outputs}) == 3
        assert llm.engine.stats().scheduler.copied_blocks > 0

    def test_prompt_logprobs(self, llm: LLM, whole: LLM) -> None:
        """In more than one piece of rows, of a prompt in chunks."""
        params = replace(GREEDY, max_tokens=3, prompt_logprobs=2, logprobs=2)
        prompt = [(i * 37) % 250 for i in range(150)]
        split, one = (each.generate([prompt], params, progress=False)[0] for each in (llm, whole))
        assert split.prompt_logprobs is not None and one.prompt_logprobs is not None
        assert len(split.prompt_logprobs) == 149
        assert split.prompt_logprobs.chosen == pytest.approx(one.prompt_logprobs.chosen, abs=1e-3)
        told, expected = split.outputs[0].logprobs, one.outputs[0].logprobs
        assert told is not None and expected is not None
        assert told.top_ids == expected.top_ids
        assert told.top == pytest.approx(expected.top, abs=1e-3)

    def test_beams(self, llm: LLM, whole: LLM) -> None:
        params = SamplingParams(max_tokens=12, n=2, use_beam_search=True, best_of=3, ignore_eos=True)
        split, one = (each.generate([PROMPT], params, progress=False)[0] for each in (llm, whole))
        assert [o.token_ids for o in split.outputs] == [o.token_ids for o in one.outputs]

    def test_guided_decoding(self, llm: LLM, whole: LLM) -> None:
        form = StructuredOutputs(regex=r"[a-f]{3}-[0-9]{4}")
        params = SamplingParams(temperature=0, max_tokens=20, structured_outputs=form)
        split, one = (each.generate(["Say"], params, progress=False)[0] for each in (llm, whole))
        assert split.outputs[0].text == one.outputs[0].text
        assert len(split.outputs[0].text) == 8


def ranks_of(llm: LLM) -> list[int]:
    """The processes of an LLM's other ranks."""
    ranks = llm.engine.runner.ranks
    assert ranks is not None
    return ranks.pids


@pytest.mark.deep
def test_stages_with_windows_and_ngrams(tmp_path: Path) -> None:
    """And ranks end with an LLM that nobody refers to any more."""
    path = TINY_MODELS["qwen2-window"](tmp_path / "model")
    llm = llm_of(path, pipeline_parallel_size=2, speculative_method="ngram")
    pids = ranks_of(llm)
    check_parity(llm, path, (3, 60, 130, 200))
    prompt = list(range(20)) * 5
    [result] = llm.generate([prompt], GREEDY, progress=False)
    expected, margin = oracle_greedy(path, prompt, NEW_TOKENS)
    assert margin > MIN_MARGIN
    assert list(result.outputs[0].token_ids) == expected
    assert llm.engine.stats().speculation.drafted_tokens > 0
    del llm
    assert gone(pids, 2.0)


@pytest.mark.deep
def test_tensor_parallel_stages_and_a_draft_model(tmp_path: Path) -> None:
    """The model drafts for itself, whole on the leader: nearly all it says is accepted."""
    path = TINY_MODELS["qwen3-biased-window"](tmp_path / "model")
    llm = llm_of(
        path,
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        speculative_method="draft",
        speculative_model=str(path),
    )
    try:
        check_parity(llm, path, (1, 40, 100))
        speculation = llm.engine.stats().speculation
        assert speculation.accepted_tokens > 0.9 * speculation.drafted_tokens > 0
    finally:
        llm.close()


@pytest.mark.deep
def test_more_ranks_than_kv_heads(tmp_path: Path) -> None:
    """Four ranks, two KV heads: each is held twice. The angles of dynamic NTK travel. An interrupt is the end
    of the ranks."""
    path = TINY_MODELS["llama-dynamic"](tmp_path / "model")
    llm = llm_of(path, tensor_parallel_size=4)
    pids = ranks_of(llm)
    runner = runner_of(llm.engine)
    assert runner.pool.shape[1] == 1
    check_parity(llm, path, (1, 40, 150))
    check_parity(llm, path, (245,))

    def interrupted(hidden: Tensor) -> Tensor:
        raise KeyboardInterrupt

    runner.model.logits = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1]], GREEDY, progress=False)
    assert gone(pids, 0.1), "they were in the middle of a step"
    with pytest.raises(RankError, match="the ranks of this model were ended"):
        llm.generate([[1]], GREEDY, progress=False)


@pytest.mark.deep
class TestReplayedSteps:
    """Decode steps that all ranks replay, with all but the recording itself as on CUDA."""

    @pytest.fixture
    def replaying(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PYTHONPATH", f"{os.environ.get('PYTHONPATH', '')}:{Path(__file__).parents[2]}")
        monkeypatch.setattr(baton.parallel.processes, "PROGRAM", "tests.support.replaying_rank")
        monkeypatch.setattr(baton.engine.graphs, "CudaRecord", Remembering)
        monkeypatch.setattr(startup, "replays", lambda config, device: not config.enforce_eager)

    @pytest.mark.usefixtures("replaying")
    @pytest.mark.parametrize("ranks", [2, 4])
    def test_they_yield_the_tokens_of_one_process(self, ranks: int, path: Path, whole: LLM) -> None:
        llm = llm_of(path, tensor_parallel_size=ranks, host_kv_bytes=1 << 22)
        try:
            model = runner_of(llm.engine).model
            assert isinstance(model, GraphedModel)
            tried = replays_of(model)
            assert tried >= len(graph_sizes(OPTIONS["max_num_seqs"])), "each once, some by first requests"
            # Batches of many sizes, in a pool that is too small for them, so that some are preempted.
            for count in (1, 3, 8):
                prompts = [[(at * 31 + i * 7) % 250 for i in range(10 + 9 * at)] for at in range(count)]
                params = [replace(GREEDY, max_tokens=8 + 6 * at) for at in range(count)]
                split, one = (each.generate(prompts, params, progress=False) for each in (llm, whole))
                assert [o.outputs[0].token_ids for o in split] == [o.outputs[0].token_ids for o in one]
            assert replays_of(model) > tried + 50
            check_parity(llm, path, (1, 40, 150))
        finally:
            llm.close()

    @pytest.mark.usefixtures("replaying")
    def test_verifications_yield_the_tokens_of_one_process(self, path: Path, whole: LLM) -> None:
        drafts = {"speculative_method": "ngram", "speculative_ngram_min": 1, "num_speculative_tokens": 3}
        llm = llm_of(path, tensor_parallel_size=2, **drafts)
        try:
            model = runner_of(llm.engine).model
            assert isinstance(model, GraphedModel)
            tried = replays_of(model, queries=4)
            assert replays_of(model) >= len(graph_sizes(OPTIONS["max_num_seqs"], 4))
            for count in (1, 3, 8):
                prompts = [[(at * 31 + i % 4 * 7) % 250 for i in range(10 + 9 * at)] for at in range(count)]
                params = [replace(GREEDY, max_tokens=8 + 6 * at) for at in range(count)]
                split, one = (each.generate(prompts, params, progress=False) for each in (llm, whole))
                assert [o.outputs[0].token_ids for o in split] == [o.outputs[0].token_ids for o in one]
            assert replays_of(model, queries=4) > tried + 24
        finally:
            llm.close()

    def test_stages_are_not_recorded(self) -> None:
        device = torch.device("cuda")
        staged = EngineConfig(Path("model"), pipeline_parallel_size=2, tensor_parallel_size=2)
        split = EngineConfig(Path("model"), tensor_parallel_size=2)
        assert startup.replays(split, device)
        assert not startup.replays(staged, device)


def replays_of(model: GraphedModel, queries: int | None = None) -> int:
    """The replays of steps of so many rows of each sequence; None: of all."""
    return sum(
        one.replays
        for size, one in model._recordings.items()
        if isinstance(one, Remembered) and queries in (None, size.queries)
    )


class TestEnds:
    def test_a_rank_that_is_killed_in_a_step(self, path: Path) -> None:
        command = [sys.executable, "-m", "tests.support.killed_rank", str(path)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert ended.returncode == 0, ended.stderr
        pid, *told = ended.stdout.splitlines()
        assert told == [f"rank 1 (process {pid}) was killed by SIGKILL"] * 2  # and it stays so

    def test_a_rank_that_cannot_load(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PYTHONPATH", f"{os.environ.get('PYTHONPATH', '')}:{Path(__file__).parents[2]}")
        monkeypatch.setattr(baton.parallel.processes, "PROGRAM", "tests.support.failing_rank")
        with pytest.raises(RankError, match=r"^rank 1 \(process \d+\) failed: no room for the weights$"):
            llm_of(path, tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"tensor_parallel_size": 3},
            "tensor_parallel_size is 3; allowed for a model of 4 attention heads and 2 KV heads: 1, 2, 4",
        ),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0; allowed: a whole number of at least 1"),
        (
            {"pipeline_parallel_size": 4},
            "pipeline_parallel_size is 4; allowed: 1 to 3, the model's layers",
        ),
        (
            {"tensor_parallel_size": 2, "speculative_method": "medusa"},
            r"speculative_method is 'medusa'; allowed with 2 ranks \(tensor_parallel_size x "
            r"pipeline_parallel_size\): none, ngram, draft",
        ),
    ],
)
def test_options_that_do_not_fit(options: dict[str, object], message: str, tmp_path: Path) -> None:
    path = TINY_MODELS["llama"](tmp_path / "model")
    with pytest.raises(ValueError, match=message):
        Engine.from_config(EngineConfig(path, **options))  # type: ignore[arg-type]
