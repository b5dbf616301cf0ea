"""The requests that an engine runs before anybody may send any."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine import first_requests
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.execution import StepResult
from baton.engine.first_requests import DRAFTED, KINDS
from baton.engine.kv.host_tier import HostTierStats
from baton.engine.runner import ModelRunner
from baton.engine.sampling.guidance import Guide, MaskStats
from baton.engine.scheduler import ScheduledBatch
from baton.engine.sequence import Sequence
from baton.engine.stats import WorkDone
from baton.grammar.errors import GrammarError
from baton.hub import resolve_model
from baton.process import logs
from baton.process.options import StartError
from baton.process.start_clock import StartClock
from baton.speculation.draft_model import DraftModelDrafter
from baton.speculation.stats import NO_DRAFTS
from baton.worker import start
from baton.worker.config import WorkerConfig
from tests.support.fake_engine import run
from tests.support.runners import runner_of
from tests.support.tiny_latents import LATENTS
from tests.support.tiny_mambas import MAMBAS
from tests.support.tiny_models import TINY_MODELS

METHODS = ("ngram", "draft", "medusa", "eagle")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TINY_MODELS["llama"](tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of requests that ran at the last start."""
    kinds: list[str] = []
    run_them = first_requests.run_first_requests

    def noted(engine: Any, runner: ModelRunner) -> tuple[str, ...]:
        kinds[:] = run_them(engine, runner)
        assert engine.stats().blocks.held == 0
        return tuple(kinds)

    monkeypatch.setattr(first_requests, "run_first_requests", noted)
    return kinds


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[ScheduledBatch]:
    """The batches of all steps that are computed."""
    seen: list[ScheduledBatch] = []
    compute = ModelRunner.run

    def noted(self: ModelRunner, batch: ScheduledBatch) -> StepResult:
        seen.append(batch)
        return compute(self, batch)

    monkeypatch.setattr(ModelRunner, "run", noted)
    return seen


def demo(**options: Any) -> Engine:
    return Engine.from_config(EngineConfig(resolve_model("demo"), num_blocks=64, **options))


@pytest.mark.parametrize("method", ["none", *METHODS])
def test_a_request_of_each_kind_runs(method: str, ran: list[str], batches: list[ScheduledBatch]) -> None:
    demo(speculative_method=method, speculative_ngram_min=1)
    drafts = method != "none"
    assert ran == [kind for kind in KINDS if drafts or kind != DRAFTED]
    items = [(batch, item) for batch in batches for item in batch.items]
    by_kind = {kind: [item for _, item in items if item.sequence.request_id == kind] for kind in ran}
    assert all(by_kind.values())
    # A whole prompt, one behind what the cache has, and decoding.
    chunks = {(item.start > 0, item.num_new > 1) for _, item in items}
    assert {(False, True), (True, True), (True, False)} <= chunks
    assert any(batch.copies for batch in batches), "two answers to a prompt, one block"
    assert any(item.sequence.guide is not None for _, item in items)
    assert any(item.sequence.mates for _, item in items)
    assert any(batch.drafts for batch in batches) == drafts


@pytest.mark.parametrize("method", ["none", *METHODS])
def test_they_leave_no_trace(method: str) -> None:
    torch.manual_seed(5), random.seed(5)
    before = torch.get_rng_state(), random.getstate()
    engine = demo(speculative_method=method, host_kv_bytes=1 << 22)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    stats = engine.stats()
    assert stats.work == WorkDone()
    assert stats.pace == replace(stats.pace, prefill_tokens_per_s=0.0, step_base_s=0.0, step_row_s=0.0)
    assert stats.speculation == NO_DRAFTS
    assert stats.host_tier == replace(HostTierStats(), slots=stats.host_tier.slots)
    assert {*vars(stats.scheduler).values()} == {0}
    assert stats.blocks == replace(stats.blocks, free=64, cached=0, held=0)
    assert (stats.generated_tokens, stats.running, stats.waiting) == (0, 0, 0)
    assert runner_of(engine).masks.stats == MaskStats()
    assert (engine.prefix_end, engine.prefix_snapshot()) == (0, ([], 0))
    assert engine.grammars is not None
    assert engine.grammars.stats().cache_misses == 0
    if engine.speculator is not None and isinstance(engine.speculator.drafter, DraftModelDrafter):
        assert engine.speculator.drafter.num_free == 64


@pytest.mark.parametrize("recipe", [LATENTS["deepseek-v3"], MAMBAS["lfm2"]], ids=["latents", "states"])
def test_of_models_that_keep_other_things(recipe: Any, ran: list[str], tmp_path: Path) -> None:
    engine = Engine.from_config(EngineConfig(recipe(tmp_path / "model"), num_blocks=200))
    assert ran == [kind for kind in KINDS if kind != DRAFTED]
    assert engine.stats().blocks.held == 0


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ({"max_num_seqs": 1}, {"beams"}),
        ({"num_blocks": 1}, {"beams"}),
        ({"max_model_len": 2}, set()),
        ({"max_model_len": 1}, {*KINDS}),
        ({"prefix_caching": False, "chunked_prefill": False}, set()),
        ({"max_num_batched_tokens": 8, "prefill_chunk": 4, "max_num_seqs": 8}, set()),
    ],
    ids=["seats", "blocks", "length", "no length", "whole prompts", "chunks"],
)
def test_options_that_allow_little(
    options: dict[str, Any], missing: set[str], llama: Path, ran: list[str]
) -> None:
    engine = Engine.from_config(EngineConfig(llama, **{"num_blocks": 64, **options}))
    assert ran == [kind for kind in KINDS if kind not in {*missing, DRAFTED}]
    assert engine.stats().blocks.held == 0


def test_what_is_generated_later_is_what_it_was(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(llama, num_blocks=64)
    requests = [Sequence(f"{i}", 1, [0] * 19, replace(params)) for i, params in enumerate(KINDS.values())]
    told = run(Engine.from_config(config), *requests[:6])
    monkeypatch.setattr(first_requests, "run_first_requests", lambda engine, runner: ())
    requests = [Sequence(f"{i}", 1, [0] * 19, replace(params)) for i, params in enumerate(KINDS.values())]
    assert told == run(Engine.from_config(config), *requests[:6])


class TestFailures:
    def fail_to_draft(self, *_: object) -> None:
        raise RuntimeError("of another shape\nin two lines")

    def test_a_drafter_that_fails_in_its_first_pass_never_gets_ready(
        self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(DraftModelDrafter, "_pass", self.fail_to_draft)
        monkeypatch.setattr(logs, "configure", lambda level: None)
        config = WorkerConfig(role="both", model="demo", speculative_method="draft", num_blocks=64)
        with pytest.raises(
            StartError, match=r"^a step of the first requests \(.*\) failed: .*of another shape$"
        ):
            start.run(config, StartClock())
        assert "READY" not in capfd.readouterr().out

    def test_ranks_are_ended(self, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        closed: list[Engine] = []
        monkeypatch.setattr(Engine, "close", lambda self: closed.append(self))
        monkeypatch.setattr(ModelRunner, "run", self.fail_to_draft)
        with pytest.raises(StartError, match=r"^a step of the first requests \(plain\) failed"):
            Engine.from_config(EngineConfig(llama, num_blocks=64))
        assert len(closed) == 1

    def test_an_answer_that_ends_in_an_error(self, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(self: Guide, output_ids: object) -> None:
            raise GrammarError("it cannot be")

        monkeypatch.setattr(Guide, "mask", refuse)
        with pytest.raises(StartError, match=r"^a first request \(guided\) failed: .*it cannot be"):
            Engine.from_config(EngineConfig(llama, num_blocks=64))

    def test_requests_that_do_not_end(self, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Engine, "step", lambda self: [])
        with pytest.raises(StartError, match=r"^the first requests \(plain\) have not ended after \d+ steps"):
            Engine.from_config(EngineConfig(llama, num_blocks=64))
