"""Penalties, biases and log-probabilities of the engine against transformers, in float32, also when a request
is preempted, resumed, or finds its prompt in the prefix cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.core.logprobs import Logprobs, TokenDetails
from baton.core.sampling_params import ResolvedSampling
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.sequence import Sequence
from tests.support.deep import all_deep_but
from tests.support.oracle_sampling import assert_logprobs, processors
from tests.support.tiny_models import EOS, TINY_MODELS, oracle_greedy

NEW_TOKENS = 40
MIN_MARGIN = 1e-3
GREEDY = ResolvedSampling(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)

SHAPED = {
    "repetition": replace(GREEDY, repetition_penalty=1.4),
    "repetition below 1": replace(GREEDY, repetition_penalty=0.8),
    "presence": replace(GREEDY, presence_penalty=1.8),
    "frequency": replace(GREEDY, frequency_penalty=0.6),
    "bias": replace(GREEDY, logit_bias=((17, 5.5), (101, -100.0), (200, 7.0))),
    "allowed": replace(GREEDY, allowed_token_ids=tuple(range(0, 320, 7))),
    "min_tokens": replace(GREEDY, min_tokens=12, logit_bias=((EOS, 60.0), (9, 50.0))),
    "all": replace(
        GREEDY,
        repetition_penalty=1.2,
        presence_penalty=0.7,
        frequency_penalty=0.3,
        logit_bias=((33, 4.0), (44, -8.0)),
        allowed_token_ids=tuple(range(5, 300)),
        min_tokens=NEW_TOKENS,
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    threads = torch.get_num_threads()
    yield TINY_MODELS["llama"](tmp_path_factory.mktemp("models") / "llama")
    torch.set_num_threads(threads)


def engine_of(model: Path, **settings: object) -> Engine:
    fields: dict[str, object] = {"dtype": "float32", "num_blocks": 128, "num_threads": 1, **settings}
    return Engine.from_config(EngineConfig(model, **fields))  # type: ignore[arg-type]


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(i * i * 7 + i * 29 + salt * 13 + 3) % 250 for i in range(length)]


def collect(engine: Engine, *sequences: Sequence) -> dict[str, list[TokenDetails | None]]:
    """Runs the sequences to their end; what each of their outputs told besides the token."""
    told: dict[str, list[TokenDetails | None]] = {seq.request_id: [] for seq in sequences}
    for seq in sequences:
        engine.add(seq)
    while engine.has_work:
        for output in engine.step():
            if output.new_tokens:
                told[output.seq.request_id].append(output.details)
    return told


def outputs_of(told: list[TokenDetails | None]) -> Logprobs:
    parts = [details.logprobs for details in told if details is not None and details.logprobs is not None]
    assert len(parts) == len(told)
    return Logprobs.join(parts)


def prompt_of(told: list[TokenDetails | None]) -> Logprobs:
    first, *others = [details.prompt_logprobs if details else None for details in told]
    assert others == [None] * len(others)
    assert first is not None
    return first


class TestShapedLogits:
    @pytest.mark.parametrize("name", all_deep_but(2, SHAPED))
    def test_give_transformers_tokens(self, model: Path, name: str) -> None:
        params = SHAPED[name]
        prompts = [prompt(length, salt) for salt, length in enumerate((1, 5, 18, 40))]
        seqs = [Sequence(str(i), 1, ids, params) for i, ids in enumerate(prompts)]
        collect(engine_of(model), *seqs)
        different = 0
        for ids, seq in zip(prompts, seqs, strict=True):
            expected, margin = oracle_greedy(model, ids, NEW_TOKENS, processors=processors(params, len(ids)))
            if name == "min_tokens":
                assert (EOS not in expected[:12], expected[12]) == (True, EOS)
            assert seq.output_ids == expected or margin < MIN_MARGIN
            different += expected != oracle_greedy(model, ids, NEW_TOKENS)[0]
        assert different >= 3, "the parameters must have made a difference"

    def test_bad_words_are_never_said(self, model: Path) -> None:
        ids = prompt(20)
        free, _ = oracle_greedy(model, ids, NEW_TOKENS)
        bad = ((free[0],), tuple(free[4:6]), tuple(free[10:13]))
        params = replace(GREEDY, bad_word_ids=bad)
        seq = Sequence("r", 1, ids, params)
        collect(engine_of(model), seq)
        expected, margin = oracle_greedy(model, ids, NEW_TOKENS, processors=processors(params, len(ids)))
        assert seq.output_ids == expected or margin < MIN_MARGIN
        assert seq.output_ids != free

    @pytest.mark.parametrize("drawn", [False, True], ids=["greedy", "drawn"])
    def test_survive_preemption_and_resumption(self, model: Path, drawn: bool) -> None:
        params = replace(SHAPED["all"], bad_word_ids=((5, 6), (40,)), min_tokens=9)
        if drawn:
            params = replace(params, temperature=1.3, seed=11, top_p=0.9)
        prompts = [prompt(12, salt) for salt in range(5)]
        alone = []
        for ids in prompts:
            seq = Sequence("alone", 1, ids, params)
            collect(engine_of(model), seq)
            alone.append(seq.output_ids)
        crowded = engine_of(model, num_blocks=9)
        seqs = [Sequence(str(i), 1, ids, params) for i, ids in enumerate(prompts)]
        collect(crowded, *seqs)
        assert crowded.stats().scheduler.preemptions > 0
        assert [seq.output_ids for seq in seqs] == alone
        for given in (1, 8, 9, 25):
            resumed = Sequence("r", 2, prompts[0], params, alone[0][:given])
            collect(engine_of(model), resumed)
            assert resumed.output_ids == alone[0]


class TestLogprobs:
    def test_are_transformers_whatever_the_parameters_and_the_batch(self, model: Path) -> None:
        asked = [
            replace(GREEDY, logprobs=0),
            replace(SHAPED["all"], logprobs=5),
            GREEDY,
            replace(GREEDY, temperature=1.7, seed=3, top_k=30, logprobs=20),
        ]
        seqs = [Sequence(str(i), 1, prompt(15, i), params) for i, params in enumerate(asked)]
        told = collect(engine_of(model), *seqs)
        for seq in seqs:
            if seq.params.logprobs is None:
                assert told[seq.request_id] == [None] * NEW_TOKENS
                continue
            outputs = outputs_of(told[seq.request_id])
            assert_logprobs(model, seq.token_ids, seq.num_prompt, outputs, seq.params.logprobs)

    def test_of_the_prompt_are_transformers_however_it_is_computed(self, model: Path) -> None:
        params = replace(GREEDY, max_tokens=3, prompt_logprobs=4)
        for settings in ({}, {"prefill_chunk": 7}, {"prefill_chunk": 1}, {"chunked_prefill": False}):
            engine = engine_of(model, **settings)
            for length in (1, 2, 16, 17, 150):
                seq = Sequence("r", 1, prompt(length), params)
                told = collect(engine, seq)["r"]
                assert_logprobs(model, prompt(length), 1, prompt_of(told), 4)

    def test_of_the_prompt_are_not_swallowed_by_the_prefix_cache(self, model: Path) -> None:
        engine = engine_of(model)
        collect(engine, Sequence("first", 1, prompt(100), GREEDY))
        asking = Sequence("asking", 1, prompt(100), replace(GREEDY, prompt_logprobs=2))
        told = collect(engine, asking)["asking"]
        assert asking.num_cached == 0
        assert_logprobs(model, prompt(100), 1, prompt_of(told), 2)
        plain = Sequence("plain", 1, prompt(100), GREEDY)
        collect(engine, plain)
        assert plain.num_cached == 96

    def test_of_the_prompt_survive_preemption_in_its_midst(self, model: Path) -> None:
        engine = engine_of(model, num_blocks=12, prefill_chunk=32, max_num_batched_tokens=64)
        first = Sequence("first", 1, prompt(40), GREEDY)
        asking = Sequence("asking", 1, prompt(100, 1), replace(GREEDY, max_tokens=2, prompt_logprobs=1))
        engine.add(first)
        engine.add(asking)
        while not asking.num_scored:
            engine.step()
        taken = engine.pool.allocate(engine.pool.num_allocatable)
        assert taken is not None
        while not asking.preemptions:  # as the first, which goes before, needs a block
            engine.step()
        assert 0 < asking.num_scored < 99
        engine.pool.free(taken)
        told: list[TokenDetails | None] = []
        while engine.has_work:
            told += [out.details for out in engine.step() if out.seq is asking and out.new_tokens]
        assert_logprobs(model, prompt(100, 1), 1, prompt_of(told), 1)

    def test_of_the_prompt_are_told_once(self, model: Path) -> None:
        params = replace(GREEDY, prompt_logprobs=1, logprobs=1)
        whole = Sequence("whole", 1, prompt(30), params)
        collect(engine_of(model), whole)
        resumed = Sequence("resumed", 2, prompt(30), params, whole.output_ids[:5])
        told = collect(engine_of(model), resumed)["resumed"]
        assert all(details is not None and details.prompt_logprobs is None for details in told)
        assert_logprobs(model, whole.token_ids, 35, outputs_of(told), 1)
