"""What tiny models are asked where all families are compared with transformers, and how much of it.

By default every family is asked in one way, and the families that differ most in one ring each; with
``BATON_FAMILIES=full`` all models in all ways and all rings, which takes more than an hour.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from pathlib import Path

import torch
from torch import Tensor
from transformers import LogitsProcessor

from baton.core.beam_search import BeamParams
from baton.models.config import ModelConfig
from tests.support.oracle_beams import oracle_beams
from tests.support.tiny_models import load_oracle, oracle_greedy

MOST_DIFFERENT = ("deepseek-v3", "gpt-oss", "gemma3", "llama4", "falcon-h1", "kimi-linear")
"""The families that differ most."""
FULL = os.environ.get("BATON_FAMILIES") == "full"
NEW_TOKENS = 48
BEAM_TOKENS = 16
BEAMS = BeamParams(3)
LONGEST = 600
MIN_MARGIN = 1e-3
"""Between the best logit and the next: an answer with closer ones may rightly differ from batch to batch and
from rank to rank."""
FEW = 2
"""An answer of no more different tokens proves little."""


@dataclass(frozen=True)
class Question:
    """A prompt and transformers' answer or, of a beam search, its two best ones."""

    prompt: list[int]
    answers: list[list[int]]


class Noise(LogitsProcessor):
    """Moves each logit by up to half of ``MIN_MARGIN``."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + MIN_MARGIN * (torch.rand(scores.shape, generator=self._generator) - 0.5)


def questions(path: Path, lengths: Sequence[int]) -> list[Question]:
    """One for each length, or for the longest prompt that leaves room for its answer. No choice along an
    answer is close."""
    longest = _context(path) - NEW_TOKENS
    return [_question(path, min(length, longest)) for length in lengths]


def _context(path: Path) -> int:
    """Tokens of a sequence of which transformers is right: of Phi-3.5-MoE, it rotates those over the trained
    length by the frequencies of short ones."""
    config = ModelConfig.from_dir(path)
    [architecture] = json.loads((path / "config.json").read_text())["architectures"]
    if architecture == "PhimoeForCausalLM" and config.rope.by_length:
        return config.rope.original_max_positions
    return config.max_model_len


@lru_cache(maxsize=16)
def _question(path: Path, length: int) -> Question:
    for seed in count():
        prompt = _prompt(path, length, seed)
        answer, margin = oracle_greedy(path, prompt, NEW_TOKENS)
        if margin > MIN_MARGIN and len(set(answer)) > FEW:
            return Question(prompt, [answer])
    raise AssertionError("unreachable")


def beam_questions(path: Path, lengths: Sequence[int]) -> list[Question]:
    """Likewise, of beam searches: their answers are the same with some noise."""
    longest = _context(path) - BEAM_TOKENS
    return [_beam_question(path, min(length, longest)) for length in lengths]


@lru_cache(maxsize=16)
def _beam_question(path: Path, length: int) -> Question:
    for seed in count():
        prompt = _prompt(path, length, seed)
        answers, noisy = _beams(path, prompt), _beams(path, prompt, [Noise()])
        if answers == noisy:
            return Question(prompt, answers)
    raise AssertionError("unreachable")


def _beams(path: Path, prompt: Sequence[int], processors: Sequence[LogitsProcessor] = ()) -> list[list[int]]:
    load_oracle.cache_clear()  # the angles of dynamic NTK depend on the longest sequence it has seen
    found = oracle_beams(path, prompt, BEAMS, BEAM_TOKENS, (), 2, processors)
    return [answer.token_ids for answer in found]


def _prompt(path: Path, length: int, seed: int) -> list[int]:
    rng = random.Random(f"{path.name} {length} {seed}")
    return [rng.randrange(256) for _ in range(length)]
