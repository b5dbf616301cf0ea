"""Steps that the CPU's kernels would misread, each refused before a kernel reads or writes anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.core.sampling_params import ResolvedSampling
from baton.engine.sequence import Sequence
from baton.models.base import CausalLM
from baton.models.decoder import Decoder
from baton.models.loader import load_model
from baton.speculation.draft_model import DraftModelDrafter
from baton_kernels.attention import new_pool
from baton_kernels.cpu.attention import CpuPlan
from baton_kernels.cpu.latent import CpuLatentPlan
from baton_kernels.cpu.library import native
from baton_kernels.paged import PagedBatch, StateRows
from tests.support.laid_out import LaidOut
from tests.support.paged_steps import Case, lay_out
from tests.support.tiny_latents import LATENTS
from tests.support.tiny_mambas import MAMBAS
from tests.support.tiny_models import TINY_MODELS
from tests.support.tiny_states import STATES

pytestmark = pytest.mark.skipif(native() is None, reason="no compiler")

CASE = Case(4, 2, 32, 16, None, decode=(40, 3), chunks=((0, 20), (17, 5)))
FAR = 1 << 40


def changed(numbers: Tensor, at: tuple[int, ...], value: int) -> Tensor:
    copy = numbers.clone()
    copy[at] = value
    return copy


def wrong_batches(batch: PagedBatch) -> dict[str, PagedBatch]:
    first, second = batch.chunks
    return {
        "slot_blocks": replace(batch, slot_blocks=changed(batch.slot_blocks, (3,), FAR)),
        "slot_blocks, below 0": replace(batch, slot_blocks=changed(batch.slot_blocks, (0,), -1)),
        "slot_blocks, int32": replace(batch, slot_blocks=batch.slot_blocks.int()),
        "slot_blocks, with holes": replace(batch, slot_blocks=batch.slot_blocks.repeat_interleave(2)[::2]),
        "slot_offsets": replace(batch, slot_offsets=changed(batch.slot_offsets, (1,), CASE.block_size)),
        "slot_offsets, of fewer": replace(batch, slot_offsets=batch.slot_offsets[1:]),
        "block tables": replace(batch, decode_tables=changed(batch.decode_tables, (1, 0), FAR)),
        "block tables, of fewer": replace(batch, decode_tables=batch.decode_tables[:1]),
        "contexts": replace(batch, decode_contexts=changed(batch.decode_contexts, (0,), 49)),
        "contexts, below 0": replace(batch, decode_contexts=changed(batch.decode_contexts, (0,), -1)),
        "contexts, of fewer": replace(batch, decode_contexts=batch.decode_contexts[1:]),
        "a chunk's table": replace(
            batch, chunks=(first, replace(second, table=changed(second.table, (1,), FAR)))
        ),
        "a context of": replace(batch, chunks=(first, replace(second, context=33))),
        "a chunk of rows": replace(batch, chunks=(first, replace(second, length=6, context=23))),
    }


@pytest.mark.parametrize("name", wrong_batches(lay_out(CASE)[1]))
def test_pages_that_the_pool_has_not(name: str) -> None:
    pool, batch = lay_out(CASE)
    assert CpuPlan.build(batch, pool) is not None
    with pytest.raises(ValueError, match=name.partition(",")[0]):
        CpuPlan.build(wrong_batches(batch)[name], pool)


def test_pages_of_latents_that_the_pool_has_not() -> None:
    _, batch = lay_out(CASE)
    view = torch.zeros(20, 1, 3, 1, CASE.block_size, 96)
    assert CpuLatentPlan.build(batch, batch, view) is not None
    for wrong in wrong_batches(batch).values():
        with pytest.raises(ValueError, match=r"allowed:|of a step of|tokens in"):
            CpuLatentPlan.build(wrong, wrong, view)
    with pytest.raises(ValueError, match="a pool of latents is"):
        CpuLatentPlan.build(batch, batch, torch.zeros(20, 2, 3, 2, CASE.block_size, 96))


def test_heads_and_layers_that_are_not_those_of_the_pool() -> None:
    pool, batch = lay_out(CASE)
    plan = CpuPlan.build(batch, pool)
    assert plan is not None
    tokens, layers = len(batch.positions), pool.shape[2]
    qkv, q = torch.zeros(tokens, 8, 32), torch.zeros(tokens, 4, 32)
    cos, sin = torch.zeros(2, tokens, 1, 32)

    def store(pool: Tensor, layer: int, qkv: Tensor, cos: Tensor = cos) -> None:
        plan.rotate_and_store(pool, layer, qkv, cos=cos, sin=sin, norm=None)

    def attend(pool: Tensor, layer: int, q: Tensor, out: Tensor | None = None) -> None:
        plan.attend(pool, layer, q, scale=1.0, window=None, softcap=None, out=out)

    store(pool, 0, qkv)
    attend(pool, 0, q)
    for layer in (-1, layers):
        with pytest.raises(ValueError, match=f"layer {layer} has heads"):
            store(pool, layer, qkv)
        with pytest.raises(ValueError, match=f"layer {layer} has heads"):
            attend(pool, layer, q)
    wrong = qkv[:1], qkv[..., :16], qkv[:, :7], qkv[:, :4], qkv.bfloat16(), qkv.half()
    for each in wrong:
        with pytest.raises(ValueError, match="layer 0 has heads"):
            store(pool, 0, each.contiguous())
    for other in (pool[:-1], pool[:, :, :2].contiguous(), pool.bfloat16()):
        with pytest.raises(ValueError, match="layer 0 has heads"):
            attend(other, 0, q)
    with pytest.raises(ValueError, match="the angles is"):
        store(pool, 0, qkv, cos[:, :, :16])
    with pytest.raises(ValueError, match="out is"):
        attend(pool, 0, q, q[:, :2])


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CausalLM]:
    root = tmp_path_factory.mktemp("models")
    recipes: dict[str, Callable[[Path], Path]] = {
        "llama": TINY_MODELS["llama"],
        "latents": LATENTS["deepseek-v3"],
        "conv": MAMBAS["lfm2"],
        "mamba": MAMBAS["bamba"],
        "delta": STATES["qwen3-next"],
    }
    return {name: load_model(recipe(root / name)) for name, recipe in recipes.items()}


def test_latents_are_never_taken_for_k_and_v(loaded: dict[str, CausalLM]) -> None:
    """A drafter has a pool of K and V, whatever its model keeps."""
    drafter = DraftModelDrafter(loaded["latents"], 8, 16, torch.device("cpu"), 64)
    seq = Sequence("r", 1, [1, 2, 3], ResolvedSampling(max_tokens=9))
    with pytest.raises(ValueError, match=r"keeps latents of 64 \+ 32 at 0 of a pool .* planned by CpuPlan"):
        drafter.draft([seq], [2])


@pytest.mark.parametrize(
    "shape", [(8, 4, 3, 16, 16), (8, 2, 2, 16, 16), (8, 2, 3, 16, 32), (8, 1, 3, 16, 16)]
)
def test_layers_over_a_pool_of_another_model(shape: tuple[int, ...], loaded: dict[str, CausalLM]) -> None:
    model = loaded["llama"]
    assert isinstance(model, Decoder)
    assert model.stack is not None
    blocks, heads, layers, block_size, dim = shape
    pool = new_pool(blocks, heads, layers, block_size, dim, dtype=model.dtype, device=torch.device("cpu"))
    at = torch.zeros(1, dtype=torch.int64)
    batch = PagedBatch(at, at, at, 1, at[None], at + 1, ())
    with pytest.raises(ValueError, match=r"a layer of 4 heads, torch\.float32, keeps K and V of"):
        model.forward(at, batch, pool)
    assert not pool.any()
    right = new_pool(8, 2, 3, 16, 16, dtype=model.dtype, device=torch.device("cpu"))
    model.forward(at, batch, right)


@pytest.mark.parametrize("name", ["conv", "mamba", "delta"])
@pytest.mark.parametrize("table", ["decode_sources", "decode_targets", "segments"])
def test_pages_of_states_that_the_pool_has_not(
    name: str, table: str, loaded: dict[str, CausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    laid = LaidOut(loaded[name], 16)
    laid.step({"a": [1, 2, 3], "b": [4, 5, 6, 7, 8, 9]})
    batch_of = laid._batch

    def wrong(*args: object) -> PagedBatch:
        batch = batch_of(*args)  # type: ignore[arg-type]
        states = batch.states
        assert isinstance(states, StateRows)
        if table == "segments":
            [segment] = states.segments
            far = replace(segment, target=torch.full_like(segment.target, FAR))
            return replace(batch, states=replace(states, segments=(far,)))
        far_pages = torch.full_like(getattr(states, table), FAR)
        return replace(batch, states=replace(states, **{table: far_pages}))  # type: ignore[arg-type]

    monkeypatch.setattr(laid, "_batch", wrong)
    with pytest.raises(ValueError, match="the pages of states name"):
        laid.step({"a": [4], "b": [10, 11, 12, 13, 14, 15]})
