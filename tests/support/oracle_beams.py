"""Beam search by transformers, and what an engine finds in the same form."""

from __future__ import annotations

from collections.abc import Sequence as Ids
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from baton.core.beam_search import BeamParams, EarlyStopping
from baton.core.sampling_params import ResolvedSampling
from baton.engine.engine import Engine
from baton.engine.sequence import FinishReason, Fork, Sequence
from tests.support.tiny_models import load_oracle

_EARLY: dict[EarlyStopping, bool | str] = {
    EarlyStopping.HEURISTIC: False,
    EarlyStopping.ALWAYS: True,
    EarlyStopping.NEVER: "never",
}


@dataclass(frozen=True)
class Answer:
    """One answer of a beam search."""

    token_ids: list[int]
    finish_reason: FinishReason


@torch.inference_mode()
def oracle_beams(
    path: Path,
    prompt_ids: Ids[int],
    beams: BeamParams,
    max_tokens: int,
    stop_ids: Ids[int],
    n: int = 1,
    processors: Ids[LogitsProcessor] = (),
) -> list[Answer]:
    """The ``n`` best answers that ``generate`` finds. ``processors`` change the scores before the choice."""
    found = load_oracle(path).generate(  # type: ignore[operator]
        torch.tensor([list(prompt_ids)]),
        attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.int64),
        do_sample=False,
        num_beams=beams.width,
        num_return_sequences=n,
        length_penalty=beams.length_penalty,
        early_stopping=_EARLY[beams.early_stopping],
        max_new_tokens=max_tokens,
        eos_token_id=list(stop_ids) or None,
        pad_token_id=-1,
        logits_processor=LogitsProcessorList(processors),
    )
    return [_answer(row, stop_ids) for row in found[:, len(prompt_ids) :].tolist()]


def _answer(row: list[int], stop_ids: Ids[int]) -> Answer:
    for at, token in enumerate(row):
        if token in stop_ids:
            return Answer(row[: at + 1], FinishReason.STOP)
    return Answer(row, FinishReason.LENGTH)


def beam_request(name: str, prompt_ids: Ids[int], params: ResolvedSampling, n: int = 1) -> Sequence:
    """A request for the ``n`` best answers, named ``name``, ``name/1``, …"""
    forks = tuple(Fork(f"{name}/{index}", params) for index in range(1, n))
    return Sequence(name, 1, prompt_ids, params, forks=forks)


def search(engine: Engine, *requests: Sequence, max_steps: int = 5000) -> list[list[Answer]]:
    """Adds the requests, searches or not, and steps until nothing is left to do. The answers of each."""
    for request in requests:
        engine.add(request)
    tokens: dict[str, list[int]] = {}
    reasons: dict[str, FinishReason] = {}
    for _ in range(max_steps):
        if not engine.has_work:
            break
        for output in engine.step():
            name = output.seq.request_id
            assert output.error is None, output.error
            if output.new_tokens:
                tokens.setdefault(name, []).extend(output.new_tokens)
            if output.finish_reason is not None:
                assert name not in reasons
                reasons[name] = output.finish_reason
    else:
        raise AssertionError(f"still at work after {max_steps} steps: {engine.stats()}")
    return [
        [
            Answer(tokens[name], reasons[name])
            for name in (request.request_id, *(fork.request_id for fork in request.forks))
        ]
        for request in requests
    ]
