"""Beam search of the engine against transformers' ``generate``, token for token, in float32."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from baton.core.beam_search import BeamParams, EarlyStopping
from baton.core.sampling_params import ResolvedSampling
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.sequence import FinishReason, Sequence
from tests.support.deep import all_deep_but
from tests.support.oracle_beams import Answer, beam_request, oracle_beams, search
from tests.support.tiny_models import EOS, IM_END, TINY_MODELS

NEW_TOKENS = 14
OFTEN = frozenset(range(40, 100))
"""Tokens that end an answer: most searches then have many to compare."""
PENALTIES = (1.0, 0.0, -1.0, 2.0, 0.6)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    threads = torch.get_num_threads()
    yield TINY_MODELS[request.param](tmp_path_factory.mktemp("models") / request.param)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def engine(model: Path) -> Engine:
    return engine_of(model)


def engine_of(model: Path, **settings: object) -> Engine:
    fields: dict[str, object] = {"dtype": "float32", "num_blocks": 256, "num_threads": 1, **settings}
    return Engine.from_config(EngineConfig(model, **fields))  # type: ignore[arg-type]


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(i * i * 7 + i * 29 + salt * 13 + 3) % 250 for i in range(length)]


def params(
    beams: BeamParams, stops: frozenset[int], max_tokens: int = NEW_TOKENS, **more: object
) -> ResolvedSampling:
    return ResolvedSampling(max_tokens, stop_token_ids=stops, beam_search=beams, **more)  # type: ignore[arg-type]


def oracle(
    model: Path,
    ids: list[int],
    beams: BeamParams,
    stops: frozenset[int],
    n: int,
    max_tokens: int = NEW_TOKENS,
) -> list[Answer]:
    return oracle_beams(model, ids, beams, max_tokens, sorted(stops | {EOS, IM_END}), n)


@pytest.mark.parametrize("early_stopping", EarlyStopping)
@pytest.mark.parametrize("width", all_deep_but(1, range(2, 9)))
def test_answers_are_transformers(
    model: Path, engine: Engine, width: int, early_stopping: EarlyStopping
) -> None:
    """All penalties at once, each with another prompt: what else is in the batch is no matter."""
    n = min(width, 3)
    cases = [
        (prompt(1 + 9 * at, width), BeamParams(width, penalty, early_stopping), OFTEN if at else frozenset())
        for at, penalty in enumerate(PENALTIES)
    ]
    requests = [
        beam_request(str(at), ids, params(beams, stops), n) for at, (ids, beams, stops) in enumerate(cases)
    ]
    found = search(engine, *requests)
    wanted = [oracle(model, ids, beams, stops, n) for ids, beams, stops in cases]
    assert found == wanted
    answers = list(itertools.chain(*found[1:]))
    assert any(answer.finish_reason is FinishReason.STOP for answer in answers)
    assert len({tuple(answer.token_ids) for answer in found[0]}) == n
    assert engine.stats().blocks.held == 0


def test_a_prompt_in_chunks_or_in_the_prefix_cache_changes_nothing(model: Path) -> None:
    beams = BeamParams(4, 0.8, EarlyStopping.NEVER)
    engine = engine_of(model, prefill_chunk=16, block_size=8)
    wanted = oracle(model, prompt(70), beams, OFTEN, 4)
    [chunked] = search(engine, beam_request("a", prompt(70), params(beams, OFTEN), 4))
    again = beam_request("b", prompt(70), params(beams, OFTEN), 4)
    [cached] = search(engine, again)
    assert (chunked, cached) == (wanted, wanted)
    assert again.num_cached == 64


def test_in_a_pool_too_small_for_all_they_are_transformers_too(model: Path) -> None:
    beams = BeamParams(3, 1.0, EarlyStopping.HEURISTIC)
    engine = engine_of(model, num_blocks=26, block_size=4)
    prompts = [prompt(9, salt) for salt in range(4)]
    requests = [
        beam_request(str(at), ids, params(beams, frozenset(), 24), 3) for at, ids in enumerate(prompts)
    ]
    found = search(engine, *requests)
    assert found == [oracle(model, ids, beams, frozenset(), 3, 24) for ids in prompts]
    load = engine.stats()
    assert load.scheduler.preemptions > 0
    assert load.scheduler.copied_blocks > 0
    assert load.blocks.held == 0


def test_log_probabilities_are_those_of_the_same_answer_scored(model: Path, engine: Engine) -> None:
    """Each answer is put behind the prompt, and scored as a prompt."""
    ids, told = prompt(20), []
    beams = params(BeamParams(3), frozenset(), logprobs=5, prompt_logprobs=2)
    engine.add(beam_request("r", ids, beams, 2))
    answers: dict[str, list[int]] = {"r": [], "r/1": []}
    while engine.has_work:
        for output in engine.step():
            if output.new_tokens:
                answers[output.seq.request_id].extend(output.new_tokens)
                told.append((output.seq.request_id, output.details))
    for name, answer in answers.items():
        scoring = ResolvedSampling(1, prompt_logprobs=5, temperature=0.0)
        engine.add(Sequence("s", 1, ids + answer, scoring))
        [scored] = [
            output.details.prompt_logprobs
            for outputs in iter(engine.step, [])
            for output in outputs
            if output.details is not None
        ]
        assert scored is not None
        details = [each for other, each in told if other == name]
        assert len(details) == len(answer)
        for at, each in enumerate(details):
            assert each is not None and each.logprobs is not None
            place = scored[len(ids) - 1 + at : len(ids) + at]
            assert each.logprobs.chosen == pytest.approx(place.chosen, abs=1e-4)
            assert list(each.logprobs.ranks) == list(place.ranks)
            assert list(each.logprobs.top_ids) == list(place.top_ids)
            assert each.logprobs.top == pytest.approx(place.top, abs=1e-4)
            assert (each.prompt_logprobs is not None) == (at == 0)
        first = details[0]
        assert first is not None and first.prompt_logprobs is not None
        assert first.prompt_logprobs.chosen == pytest.approx(scored.chosen[: len(ids) - 1], abs=1e-4)
