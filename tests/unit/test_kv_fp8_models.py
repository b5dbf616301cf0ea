"""Whole models over a pool of FP8, against the same models over a pool of floats whose K and V are rounded as
they are stored."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from baton.core.block_hash import hash_blocks
from baton.core.sampling_params import ResolvedSampling
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.sequence import Sequence
from baton.models.attention import Attention
from baton.models.base import CausalLM
from baton.models.config import ModelConfig
from baton.models.loader import kv_dtype, kv_layout, load_model
from baton.process.options import ModelError
from baton_kernels.kv_fp8 import FP8, UNSCALED, KVScales, to_codes
from baton_kernels.paged import PagedBatch, Planner
from baton_kernels.plain import PlainPlan
from baton_kernels.rotary import HeadNorm, normed_and_rotated
from baton_kernels.step_attention import StepAttention
from baton_kernels.window import Window
from tests.support.laid_out import LaidOut
from tests.support.model_ring import prompt
from tests.support.tiny_models import ModelDir

NAMES = ("llama", "qwen3-biased-window", "gemma2", "gpt-oss", "llama4", "qwen3-next", "nemotron-h")
"""One group, windows, soft-caps, sinks, runs, and two families with states."""
SCALES = KVScales(0.3, 2.5)


@dataclass(frozen=True)
class RoundingPlan:
    """A step over a pool of floats that holds what the codes of FP8 stand for."""

    plain: PlainPlan
    of_layers: KVScales

    @classmethod
    def planner(cls, of_layers: KVScales) -> Planner:
        def plan(
            batch: PagedBatch, pool: Tensor, windows: Collection[Window | None], heads: int
        ) -> StepAttention:
            return cls(PlainPlan.build(replace(batch, planner=None), pool, windows), of_layers)

        return plan

    def write_kv(self, pool: Tensor, layer: int, k: Tensor, v: Tensor, scales: KVScales = UNSCALED) -> None:
        of_k, of_v = self.of_layers.factors
        k, v = to_codes(k, of_k).float() * self.of_layers.k, to_codes(v, of_v).float() * self.of_layers.v
        self.plain.write_kv(pool, layer, k, v)

    def rotate_and_store(
        self,
        pool: Tensor,
        layer: int,
        qkv: Tensor,
        *,
        cos: Tensor,
        sin: Tensor,
        norm: HeadNorm | None,
        scales: KVScales = UNSCALED,
    ) -> Tensor:
        kv_heads = pool.shape[1]
        q, k, v = normed_and_rotated(qkv, qkv.shape[1] - 2 * kv_heads, kv_heads, cos, sin, norm)
        self.write_kv(pool, layer, k, v)
        return q

    def attend(
        self,
        pool: Tensor,
        layer: int,
        q: Tensor,
        *,
        scale: float,
        window: Window | None,
        softcap: float | None,
        sinks: Tensor | None = None,
        scales: KVScales = UNSCALED,
        out: Tensor | None = None,
    ) -> Tensor:
        return self.plain.attend(
            pool, layer, q, scale=scale, window=window, softcap=softcap, sinks=sinks, out=out
        )


def logits_of(laid: LaidOut) -> Tensor:
    """The logits of two prompts of which one comes in two chunks, and of a token behind each."""
    ids = prompt(60, seed=1)
    steps = [{"a": ids[:40]}, {"a": ids[40:], "b": ids[:9]}, {"a": ids[:1], "b": ids[1:2]}]
    return torch.cat([rows for step in steps for rows in laid.step(step).values()])


def scaled(model: CausalLM, scales: KVScales) -> CausalLM:
    for module in model.modules():
        if isinstance(module, Attention):
            module.kv_scales.copy_(torch.tensor((scales.k, scales.v)))
    return model


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_over_rounded_kv(name: str, model_dir: ModelDir) -> None:
    path = model_dir(name)
    scales = SCALES if name in ("llama", "gemma2") else UNSCALED
    found = logits_of(LaidOut(scaled(load_model(path), scales), 16, kv_dtype=FP8))
    rounding = RoundingPlan.planner(scales)
    expected = logits_of(LaidOut(load_model(path), 16, planner=rounding))
    exact = logits_of(LaidOut(load_model(path), 16))
    # Kernels add up in other orders. Where that makes a number the neighbour's code, logits behind it differ.
    assert (found - expected).abs().mean() < 0.01 * (exact - expected).abs().mean()
    assert (found - expected).abs().median() < 1e-3


def names_of(engine: Engine, prompt_ids: list[int]) -> list[bytes]:
    """The names of the blocks of this prompt once it is answered."""
    engine.add(Sequence("a", 0, prompt_ids, ResolvedSampling(max_tokens=1)))
    while engine.has_work:
        engine.step()
    return engine.pool.digests()


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_page_has_half_the_bytes(name: str, model_dir: ModelDir) -> None:
    config = ModelConfig.from_dir(model_dir(name))
    halved = kv_layout(config, 64, kv_dtype("fp8", config, torch.bfloat16, "cpu"))
    whole = kv_layout(config, 64, kv_dtype("auto", config, torch.bfloat16, "cpu"))
    assert 2 * halved.page_bytes == whole.page_bytes
    assert [group.tables for group in halved.groups] == [group.tables for group in whole.groups]


def test_a_pool_of_the_same_bytes_holds_twice_as_many_tokens(model_dir: ModelDir) -> None:
    path = model_dir("llama")

    def engine(held: str) -> Engine:
        return Engine.from_config(
            EngineConfig(path, dtype="bfloat16", kv_cache_dtype=held, kv_cache_bytes=1 << 20, num_threads=1)  # type: ignore[arg-type]
        )

    ours, theirs = engine("fp8"), engine("auto")
    assert ours.pool.num_blocks // 2 == theirs.pool.num_blocks
    named = [set(names_of(engine, [5] * 40)) for engine in (ours, theirs)]
    assert named == [set(hash_blocks([5] * 40, 16, kv_dtype=held)) for held in ("fp8", "")]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("deepseek-v3", "DeepseekV3ForCausalLM, which keeps latents"),
        ("kimi-linear", "KimiLinearForCausalLM, which keeps latents"),
    ],
)
def test_models_without_k_and_v_are_refused(name: str, says: str, model_dir: ModelDir) -> None:
    with pytest.raises(ModelError) as refused:
        Engine.from_config(EngineConfig(model_dir(name), kv_cache_dtype="fp8"))
    assert str(refused.value) == f"kv_cache_dtype is 'fp8'; allowed: auto for {says}"


@pytest.mark.parametrize(
    ("dtype", "device", "others"),
    [(torch.float16, "cpu", "float32, bfloat16"), (torch.float32, "cuda", "float16, bfloat16")],
)
def test_types_without_kernels_are_refused(
    dtype: torch.dtype, device: str, others: str, model_dir: ModelDir
) -> None:
    config = ModelConfig.from_dir(model_dir("llama"))
    says = f"allowed: auto with dtype .* on {device}, or another dtype: {others}$"
    with pytest.raises(ModelError, match=says):
        kv_dtype("fp8", config, dtype, device)


def test_scales_by_block_are_refused_where_there_are_no_kernels(model_dir: ModelDir) -> None:
    config = ModelConfig.from_dir(model_dir("llama"))
    with pytest.raises(ModelError, match=r"kv_cache_dtype is 'fp8-dynamic'; allowed on cuda: auto, fp8$"):
        kv_dtype("fp8-dynamic", config, torch.bfloat16, "cuda")
    with pytest.raises(ModelError, match=r"allowed for LlamaForCausalLM, of heads of 16: auto, fp8$"):
        kv_dtype("fp8-dynamic", config, torch.bfloat16, "cpu")
    latents = ModelConfig.from_dir(model_dir("deepseek-v3"))
    with pytest.raises(ModelError, match="DeepseekV3ForCausalLM, which keeps latents"):
        kv_dtype("fp8-dynamic", latents, torch.bfloat16, "cpu")


def test_a_scale_that_divides_nothing_is_refused_with_its_layer(model_dir: ModelDir) -> None:
    model = scaled(load_model(model_dir("llama")), SCALES)
    for module in model.modules():
        if isinstance(module, Attention) and module.number == 1:
            module.kv_scales[1] = float("nan")
    with pytest.raises(ModelError, match="attention of layer 1: v_scale is nan; allowed: finite and above 0"):
        model.lay_out(kv_layout(model.config, 16, FP8))
