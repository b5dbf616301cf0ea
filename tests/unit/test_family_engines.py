"""Every family through an engine: transformers' tokens, in whatever chunks and blocks they are computed.

Each family in one of the ways, which together hold every two of their settings; ``BATON_FAMILIES=full`` has
every model in every one of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import count, cycle
from pathlib import Path
from typing import cast

import pytest
import torch

from baton.core.sampling_params import ResolvedSampling
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine, SequenceOutput
from baton.engine.kv.break_even import BreakEven
from baton.engine.kv.page_counts import PageCounts
from baton.engine.sequence import Sequence
from baton.models.config import ModelConfig
from baton.models.loader import kv_layout
from baton.models.registry import FAMILIES
from baton_kernels.kv_layout import KVLayout
from tests.support.covering import covering
from tests.support.deep import all_deep_but
from tests.support.family_cases import (
    BEAM_TOKENS,
    BEAMS,
    FULL,
    LONGEST,
    MOST_DIFFERENT,
    NEW_TOKENS,
    Question,
    beam_questions,
    questions,
)
from tests.support.family_models import FAMILY_MODELS, MODELS_OF
from tests.support.oracle_beams import beam_request, search
from tests.support.tiny_models import ModelDir

BLOCK_SIZE = 4
PROMPTS = (1, 17, LONGEST) if FULL else (1, LONGEST)
TOKEN_BY_TOKEN = PROMPTS if FULL else (1, 150)
IN_WANT_OF_BLOCKS = (100, 90, 17)
"""Prompts that need them at the same time, however they are cut."""
HOST_BYTES = 32 << 20
AMPLE = 512
"""Blocks."""
MANY = 60
"""States."""


@dataclass(frozen=True)
class Way:
    """How an engine comes to its answers."""

    chunk: str
    blocks: str
    """Enough; or too few, and what a sequence has lost is computed again, or copied back from the host."""
    caches: str
    asked: str
    """What is asked for: one answer, three alike, or the best two of a beam search."""

    def __str__(self) -> str:
        return "-".join((self.chunk, self.blocks, self.caches, self.asked))

    @property
    def params(self) -> ResolvedSampling:
        if self.asked == "beams":
            return ResolvedSampling(BEAM_TOKENS, ignore_eos=True, beam_search=BEAMS)
        return ResolvedSampling(NEW_TOKENS, temperature=0.0, ignore_eos=True)

    @property
    def answers(self) -> int:
        return {"one": 1, "three": 3, "beams": 2}[self.asked]

    def questions(self, path: Path) -> list[Question]:
        enough = TOKEN_BY_TOKEN if self.chunk == "by-1" else PROMPTS
        lengths = enough if self.blocks == "enough" else IN_WANT_OF_BLOCKS
        if self.asked == "beams":
            return beam_questions(path, lengths)
        return questions(path, lengths)

    def engine(self, path: Path) -> Engine:
        return Engine.from_config(
            EngineConfig(
                path,
                dtype="float32",
                num_threads=1,
                block_size=BLOCK_SIZE,
                num_blocks=self._num_pages(layout_of(path)),
                host_kv_bytes=HOST_BYTES if self.blocks == "swapped" else 0,
                chunked_prefill=self.chunk != "whole",
                prefill_chunk=1 if self.chunk == "by-1" else 16,
                max_num_batched_tokens=1024 if self.chunk == "whole" else 64,
            )
        )

    def _num_pages(self, layout: KVLayout) -> int:
        """Too few pages are those of all prompts, or of the longest sequence with all its answers."""
        if self.blocks == "enough" or (self.asked == "beams" and not layout.keeps_blocks):
            return AMPLE * layout.num_tables + MANY * layout.state_pages
        counts = PageCounts(layout, 16)
        rows = max(self.answers, BEAMS.width) if self.asked == "beams" else self.answers
        first, more = IN_WANT_OF_BLOCKS[0], self.params.max_tokens
        if not layout.keeps_blocks:  # a thief sees to it that they run short
            return (
                2 * sum(counts.of(length + more) for length in IN_WANT_OF_BLOCKS) + MANY * layout.state_pages
            )
        longest = _blocks(first) + rows * (_blocks(more) + 1) + 2
        return max(longest, sum(_blocks(length) for length in IN_WANT_OF_BLOCKS) + 3)


def layout_of(path: Path) -> KVLayout:
    return kv_layout(ModelConfig.from_dir(path), BLOCK_SIZE, torch.float32)


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)


WAYS = [
    Way(**cast(dict[str, str], way))
    for way in covering(
        {
            "chunk": ("by-1", "by-16", "whole"),
            "blocks": ("enough", "recomputed", "swapped"),
            "caches": ("cold", "warm"),
            "asked": ("one", "three", "beams"),
        }
    )
]
if FULL:
    CASES = [(name, way) for name in FAMILY_MODELS for way in WAYS]
else:
    CASES = list(zip((names[0] for names in MODELS_OF.values()), cycle(WAYS), strict=False))


EVERYDAY = [case for case in CASES if case[0] in MOST_DIFFERENT]


@pytest.mark.parametrize(("name", "way"), all_deep_but(EVERYDAY[:3], CASES), ids=str)
def test_tokens_are_those_of_transformers(
    name: str, way: Way, model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Which of the two is quicker is no matter here.
    monkeypatch.setattr(BreakEven, "copying_pays", lambda self, blocks: way.blocks == "swapped")
    path = model_dir(name)
    asked, engine = way.questions(path), way.engine(path)
    expected = [question.answers * (way.answers if way.asked == "three" else 1) for question in asked]
    if way.blocks != "enough" and not engine.layout.keeps_blocks:
        let_a_thief_in(engine, monkeypatch)

    def ask(turn: str) -> list[Sequence]:
        requests = [
            beam_request(f"{turn}{at}", question.prompt, way.params, way.answers)
            for at, question in enumerate(asked)
        ]
        found = search(engine, *requests)
        assert [[answer.token_ids for answer in answers] for answers in found] == expected
        return requests

    ask("cold")
    if way.caches == "warm":
        again = ask("warm")
        if way.blocks == "enough":
            assert [request.num_cached for request in again] == _found_again(engine, again)
    counted = engine.stats().scheduler
    assert (counted.preemptions > 0) is (way.blocks != "enough")
    if way.blocks == "swapped" and engine.layout.keeps_blocks:
        assert counted.swapped_in > 0 or not _shares(engine)
    elif way.blocks != "swapped":
        assert counted.swapped_in == 0
    assert engine.stats().blocks.held == 0


def let_a_thief_in(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every now and then somebody takes all pages that are to be had, for as long as anything can go on."""
    step, stolen, steps = engine.step, list[int](), count()

    def robbed() -> list[SequenceOutput]:
        if next(steps) % 9 == 8 and not stolen:
            stolen.extend(engine.pool.allocate(engine.pool.num_allocatable) or ())
            engine.copy_blocks()
        outputs = step()
        if stolen and (engine.stalled or next(steps) % 4 == 0 or not engine.has_work):
            engine.pool.free(stolen)
            stolen.clear()
        return outputs

    monkeypatch.setattr(engine, "step", robbed)


def _shares(engine: Engine) -> bool:
    """Whether all prompts that want blocks may share theirs, and so get them back."""
    shared = engine.scheduler.limits.longest_shared_prompt
    return shared is None or shared >= max(IN_WANT_OF_BLOCKS)


def _found_again(engine: Engine, requests: list[Sequence]) -> list[int]:
    """Tokens of whole blocks, but the last token; none of a prompt whose angles are its own."""
    shared = engine.scheduler.limits.longest_shared_prompt
    lengths = [request.num_prompt for request in requests]
    whole = [(length - 1) // BLOCK_SIZE * BLOCK_SIZE for length in lengths]
    own = [shared is not None and length > shared for length in lengths]
    return [0 if alone else tokens for tokens, alone in zip(whole, own, strict=True)]


def test_every_model_is_of_an_architecture() -> None:
    assert MODELS_OF.keys() == FAMILIES.keys()
    assert sorted(name for names in MODELS_OF.values() for name in names) == sorted(FAMILY_MODELS)
    assert {name for name, _ in CASES} >= {names[0] for names in MODELS_OF.values()}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_architecture_has_a_tiny_model(architecture: str, model_dir: ModelDir) -> None:
    for name in MODELS_OF[architecture] if FULL else MODELS_OF[architecture][:1]:
        config = json.loads((model_dir(name) / "config.json").read_text())
        assert config["architectures"][0] == architecture
