"""Medusa and EAGLE in the engine: whatever they draft, the tokens are those of a run without drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from baton import hub
from baton.core.sampling_params import ResolvedSampling
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.sequence import Fork, Sequence
from baton.speculation.config import Method
from baton.text.tokenizer import Tokenizer
from tests.support.fake_engine import run
from tests.support.heads import save_eagle, save_medusa
from tests.support.tiny_models import TINY_MODELS

pytestmark = pytest.mark.deep

GREEDY = ResolvedSampling(max_tokens=24, temperature=0.0, ignore_eos=True)
DRAWN = ResolvedSampling(max_tokens=24, seed=3, temperature=0.9, top_p=0.95, repetition_penalty=1.1)
SAVE: dict[Method, Callable[..., Path]] = {"medusa": save_medusa, "eagle": save_eagle}
METHODS: list[Method] = ["medusa", "eagle"]
QUESTIONS = ["What is Baton?", "What is paged attention?", "Why split prefill and decode?"]

TOO_SMALL = {"num_blocks": 20, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 20}
"""A pool in which the prompts preempt each other."""


def engine_of(path: Path, method: Method = "none", **settings: object) -> Engine:
    common = {"dtype": "float32", "num_blocks": 64, "max_num_batched_tokens": 128, "prefill_chunk": 32}
    return Engine.from_config(
        EngineConfig(model=path, speculative_method=method, **{**common, **settings})  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights, and random heads in its directory."""
    path = TINY_MODELS[request.param](tmp_path_factory.mktemp("heads") / "model")
    for method, save in SAVE.items():
        save(path / method, path)
    return path


def prompts() -> list[list[int]]:
    return [[(i * i * 31 + i * 17 + salt * 7 + 5) % 256 for i in range(5 + 9 * salt)] for salt in range(5)]


@cache
def plain(path: Path, params: ResolvedSampling) -> list[list[int]]:
    return run(engine_of(path), *(Sequence(f"{i}", 1, p, params) for i, p in enumerate(prompts())))


class TestRandomHeads:
    """Nearly all of what they draft is refused."""

    @pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
    @pytest.mark.parametrize("method", METHODS)
    def test_change_no_token(self, tiny: Path, method: Method, params: ResolvedSampling) -> None:
        for settings in ({}, TOO_SMALL):
            engine = engine_of(tiny, method, num_speculative_tokens=5, **settings)
            outputs = run(engine, *(Sequence(f"{i}", 1, p, params) for i, p in enumerate(prompts())))
            assert outputs == plain(tiny, params)
            load = engine.stats()
            assert load.speculation.drafted_tokens > 0
            assert load.blocks.held == 0
            assert bool(settings) == bool(load.scheduler.preemptions)
            self.check_nothing_is_kept(engine)

    @pytest.mark.parametrize("method", METHODS)
    def test_serve_forks_and_cached_prefixes(self, tiny: Path, method: Method) -> None:
        prompt = prompts()[4]

        def answers(engine: Engine) -> list[list[int]]:
            params = [replace(DRAWN, seed=seed) for seed in range(3)]
            told: dict[str, list[int]] = {}
            for turn in range(2):  # the second finds its prompt in the prefix cache
                forks = tuple(Fork(f"{turn}.{at}", params[at]) for at in (1, 2))
                engine.add(Sequence(f"{turn}.0", 1, prompt, params[0], forks=forks))
                while engine.has_work:
                    for output in engine.step():
                        told.setdefault(output.seq.request_id, []).extend(output.new_tokens)
            return [told[name] for name in sorted(told)]

        engine = engine_of(tiny, method)
        assert answers(engine) == answers(engine_of(tiny))
        self.check_nothing_is_kept(engine)

    @staticmethod
    def check_nothing_is_kept(engine: Engine) -> None:
        assert engine.speculator is not None
        engine.speculator.forget_ended()
        assert engine.speculator.drafter.num_sequences == 0  # type: ignore[attr-defined]


class TestDemoHeads:
    @pytest.mark.parametrize("method", ["draft", *METHODS])
    def test_draft_what_the_demo_model_says(self, method: Method) -> None:
        path = hub.resolve_model("demo")
        tokenizer = Tokenizer.from_dir(path)
        texts = [f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n" for q in QUESTIONS]
        ids = [list(tokenizer.encode(text)) for text in texts]
        runs = [(p, replace(GREEDY, max_tokens=48, ignore_eos=False)) for p in ids]
        runs += [(p, replace(DRAWN, max_tokens=48, seed=at)) for at, p in enumerate(ids)]

        def outputs(engine: Engine) -> list[list[int]]:
            return run(engine, *(Sequence(f"{i}", 1, *request) for i, request in enumerate(runs)))

        engine = engine_of(path, method, num_speculative_tokens=3)
        assert outputs(engine) == outputs(engine_of(path))
        stats = engine.stats().speculation
        assert 1 + stats.accepted_tokens / stats.verifications > 1.8


class TestChoosing:
    @pytest.mark.parametrize("method", METHODS)
    def test_needs_heads(self, tiny: Path, tmp_path: Path, method: Method) -> None:
        bare = TINY_MODELS["llama"](tmp_path / "model")
        with pytest.raises(ValueError, match=f"speculative_method {method} needs a speculative_model"):
            engine_of(bare, method)
        with pytest.raises(ValueError, match="no such directory"):
            engine_of(bare, method, speculative_model="./nothing")
        with pytest.raises(ValueError, match="hidden_size is 256; allowed: 64"):
            engine_of(bare, method, speculative_model=str(hub.resolve_model("demo") / method))
        SAVE[method](tmp_path / "heads", bare)
        assert engine_of(bare, method, speculative_model=str(tmp_path / "heads")).speculator is not None
