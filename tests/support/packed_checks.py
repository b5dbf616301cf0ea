"""What every form of quantized checkpoint promises."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from baton.models.base import CausalLM
from baton.models.decoder import Decoder
from baton.models.loader import load_model
from tests.support.laid_out import LaidOut
from tests.support.model_ring import assert_same, prompt
from tests.support.rank_threads import in_ranks
from tests.support.tiny_models import oracle_greedy, oracle_logits

IDS = prompt(45)
TOKENS = 6


def logits_of(model: CausalLM) -> Tensor:
    return LaidOut(model, 16).step({"a": IDS})["a"]


def greedy(model: CausalLM) -> list[int]:
    """The first tokens of the answer."""
    laid, step, answer = LaidOut(model, 16), IDS, list[int]()
    while len(answer) < TOKENS:
        answer.append(int(laid.step({"a": step})["a"][-1].argmax()))
        step = answer[-1:]
    return answer


def assert_stands_for(packed: Path, meant: Path) -> CausalLM:
    """Checks that the packed model is the one that is meant: bit by bit its weights, its logits and its
    answer those of transformers. Returns it."""
    model = load_model(packed, "float32")
    assert_same(logits_of(model), oracle_logits(meant, IDS))
    assert greedy(model) == oracle_greedy(meant, IDS, TOKENS)[0]
    return model


def assert_split_alike(packed: Path) -> None:
    """Checks that two ranks compute what one does."""
    assert_same(in_ranks(packed, 2, 1, logits_of, quantization="auto")[0], logits_of(load_model(packed)))
