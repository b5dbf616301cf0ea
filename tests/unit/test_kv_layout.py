"""Pages that groups of layers share: little of any is lost, and what cannot be shared is refused by name."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.startup import WASTEFUL, best_block_size
from baton.models.config import ModelConfig
from baton.models.loader import kv_layout
from baton.process.options import ModelError
from baton_kernels.kv_layout import KVLayout, KVLayoutError, StateKV, TokenKV
from baton_kernels.window import ChunkedWindow
from tests.support.published_configs import PUBLISHED
from tests.support.tiny_models import ModelDir

FULL, WINDOW, LATENT = TokenKV(4, 2, 256), TokenKV(4, 2, 256, 1024), TokenKV(1, 1, 576)


@pytest.mark.parametrize("name", PUBLISHED)
def test_little_of_a_page_is_lost(name: str) -> None:
    """Of checkpoints as they are published, in blocks of 64."""
    config = ModelConfig.from_dict(PUBLISHED[name])
    assert kv_layout(config, 64, torch.bfloat16).lost < 0.12


@pytest.mark.parametrize(("layers", "tables"), [(26, [2, 11]), (34, [1, 6])])
def test_few_tables(layers: int, tables: list[int]) -> None:
    kept = [(FULL,) if (layer + 1) % 6 == 0 else (WINDOW,) for layer in range(layers)]
    assert [len(group.tables) for group in KVLayout.of(kept, 16, 2).groups] == tables


def test_every_stage_has_the_same_tables() -> None:
    kept = [(FULL,) if (layer + 1) % 6 == 0 else (WINDOW,) for layer in range(26)]
    whole = KVLayout.of(kept, 16, 2)
    stages = [KVLayout.of(kept, 16, 2, range(13)), KVLayout.of(kept, 16, 2, range(13, 26))]
    for stage in stages:
        assert [group.tables for group in stage.groups] == [group.tables for group in whole.groups]
        for layer in stage.groups[1].layers:
            place = stage.place_of(layer, WINDOW)
            assert place.index < stage.view_shape(place.table, 1)[2]
    assert sum((stage.groups[0].layers for stage in stages), ()) == whole.groups[0].layers


def test_the_order_of_groups_is_that_of_their_sizes() -> None:
    """Tensor parallelism changes the number of heads, not the order."""
    wide, narrow = TokenKV(16, 2, 64, 512), TokenKV(8, 2, 64, 4096)
    chunked = TokenKV(8, 2, 64, ChunkedWindow(64))
    for ranks in (1, 2, 4, 8):
        kinds = [replace(kv, heads=kv.heads // ranks) for kv in (narrow, chunked, wide)]
        layout = KVLayout.of([(kv,) for kv in kinds], 16, 2)
        assert [group.kv for group in layout.groups] == [kinds[1], kinds[2], kinds[0]]


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ([(TokenKV(1, 2, 127),), (TokenKV(1, 2, 113, 8),)], "cannot share a page size: .* 127 .* 113"),
        ([(StateKV(2, 8),), (StateKV(2, 9),)], "states of one size .* 2 x 8 numbers; .* 2 x 9 numbers"),
        ([()], "no layer keeps anything"),
    ],
)
def test_what_cannot_be(kept: list[tuple[TokenKV | StateKV, ...]], message: str) -> None:
    with pytest.raises(KVLayoutError, match=message):
        KVLayout.of(kept, 16, 2)


def test_a_window_of_nothing_is_refused() -> None:
    config = dict(PUBLISHED["gemma-3-1b-it"]) | {"sliding_window": 0}
    with pytest.raises(ModelError, match=re.escape("sliding_window")):
        ModelConfig.from_dict(config)


def test_a_state_larger_than_the_memory(model_dir: ModelDir) -> None:
    config = EngineConfig(model_dir("qwen3-next"), dtype="float32", block_size=4, num_blocks=3)
    with pytest.raises(ValueError, match=r"the KV cache of 3 pages .* one takes \d+ pages, \d+ of them"):
        Engine.from_config(config)


def test_a_block_size_that_wastes_pages_is_said(
    model_dir: ModelDir, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = model_dir("kimi-linear")
    model = ModelConfig.from_dir(path)
    sizes = {size: kv_layout(model, size, torch.float32).lost for size in (1, 2, 4, 8, 16, 32, 64, 128)}
    worst = max(sizes, key=lambda size: sizes[size])
    assert sizes[worst] > WASTEFUL
    best, lost = best_block_size(model, torch.float32, None)
    assert lost <= WASTEFUL
    Engine.from_config(EngineConfig(path, dtype="float32", block_size=worst, num_blocks=400))
    assert f"block_size {worst} leaves" in caplog.text
    assert f"{best} leaves" in caplog.text
