"""The families with latent attention against transformers: prompts whole and in chunks, mixed steps, and
splits."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.models import latent_attention
from baton.models.base import CausalLM
from baton.models.config import ModelConfig
from baton.models.decoder import Decoder
from baton.models.loader import kv_layout, load_model
from baton.models.mixer_config import LatentConfig
from baton.parallel.shard import Shard
from baton.process.options import ModelError
from baton_kernels.cpu.experts import PackedExperts
from baton_kernels.cpu.layers import LayerStack
from baton_kernels.cpu.linear import PackedWeight
from tests.support.deep import all_deep_but
from tests.support.exact import alike, assert_same, exact_logits
from tests.support.laid_out import LaidOut
from tests.support.model_ring import prompt
from tests.support.rank_threads import in_ranks
from tests.support.tiny_latents import LATENTS
from tests.support.tiny_models import ModelDir, oracle_logits

LENGTH = 71
ONE_OF_EACH = [name for name in LATENTS if name not in ("deepseek-v3-halves", "minicpm3-direct-queries")]


def mixed_steps(laid: LaidOut, a: list[int], b: list[int]) -> dict[str, Tensor]:
    """The logits of two sequences: uneven chunks, long ones and short ones, one decoding beside the other's
    chunk, both decoding."""
    cut = len(a) - 4
    steps = [
        laid.step({"a": a[:50], "b": b[:3]}),
        laid.step({"a": a[50:51], "b": b[3:40]}),
        laid.step({"a": a[51:cut], "b": b[40:47]}),
        *(laid.step({"b": [b[47 + i]], "a": [a[cut + i]]}) for i in range(4)),
    ]
    return {name: torch.cat([step[name] for step in steps if name in step]) for name in "ab"}


@pytest.mark.parametrize("name", all_deep_but(5, LATENTS))
def test_logits_are_those_of_transformers(name: str, model_dir: ModelDir) -> None:
    """Whole, token by token, and in mixed steps."""
    path, a, b = model_dir(name), prompt(LENGTH, seed=1), prompt(51, seed=2)
    expected = {"a": exact_logits(path, a), "b": exact_logits(path, b)}
    laid = LaidOut(load_model(path), 16)
    assert_same(laid.step({"whole": a})["whole"], expected["a"])
    single = [laid.step({"single": [token]})["single"] for token in b]
    assert_same(torch.cat(single), expected["b"])
    for sequence, logits in mixed_steps(laid, a, b).items():
        assert_same(logits, expected[sequence])


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "mistral4", "minicpm3"])
@pytest.mark.parametrize("expands", [False, True])
def test_both_ways_are_the_same(
    name: str, expands: bool, model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks whose keys and values are made of the latents, of some heads at a time, and chunks that read
    these."""
    monkeypatch.setattr(LatentConfig, "expands", lambda *_: expands)
    monkeypatch.setattr(latent_attention, "MADE_NUMBERS", 6000)
    path, ids = model_dir(name), prompt(LENGTH)
    laid = LaidOut(load_model(path), 8)
    parts = [laid.step({"a": ids[at : at + 19]})["a"] for at in range(0, LENGTH, 19)]
    assert_same(torch.cat(parts), exact_logits(path, ids))


def test_the_cheaper_way_is_taken() -> None:
    """DeepSeek-V3: 1 token reads the latents; a prompt makes keys and values; behind a long context, too
    few tokens to make them pay read the latents."""
    sizes = LatentConfig(1536, 512, 128, 64, 128)
    assert not sizes.expands(1, 2)
    assert not sizes.expands(1, 5000)
    assert sizes.expands(2000, 2000)
    assert not sizes.expands(100, 5000)
    assert sizes.expands(400, 5000)


@pytest.mark.parametrize("name", ["deepseek-v3", "mistral4", "deepseek-v2-lite"])
def test_rows_that_are_wanted_alone(name: str, model_dir: ModelDir) -> None:
    path = model_dir(name)
    model = load_model(path)
    whole, narrow = LaidOut(model, 16), LaidOut(model, 16)
    first, second = {"a": prompt(50, 1), "b": prompt(33, 2)}, {"a": prompt(20, 4), "b": prompt(7, 5)}
    whole.step(first)
    assert narrow.step_wanted(first, []) == []
    expected = whole.step(second)
    got = narrow.step_wanted(second, ["b", "a"])
    torch.testing.assert_close(narrow.pool, whole.pool, rtol=0, atol=1e-5, equal_nan=True)
    for sequence, logits in zip(("b", "a"), got, strict=True):
        exact = exact_logits(path, first[sequence] + second[sequence])
        assert_same(logits, alike(expected[sequence][-1], exact))


@pytest.mark.parametrize("name", all_deep_but(3, ONE_OF_EACH))
def test_bfloat16(name: str, model_dir: ModelDir, tmp_path: Path) -> None:
    """Half of the tokens' logits stay within 4 % of float32's, in norm, and nearer than transformers'."""
    path, ids = shutil.copytree(model_dir(name), tmp_path / name), prompt(LENGTH)
    for file in path.glob("*.safetensors"):
        rounded = {key: weight.bfloat16().float() for key, weight in load_file(file).items()}
        save_file(rounded, file, metadata={"format": "pt"})
    exact = oracle_logits(path, ids)

    def error(logits: Tensor) -> float:
        return float(((logits - exact).norm(dim=1) / exact.norm(dim=1)).median())

    model, theirs = load_model(path, dtype="bfloat16"), error(oracle_logits(path, ids, "bfloat16"))
    whole = error(LaidOut(model, 16).step({"a": ids})["a"])
    laid = LaidOut(model, 16)
    single = error(torch.cat([laid.step({"a": [token]})["a"] for token in ids]))
    assert max(whole, single) < 4e-2
    assert max(whole, single) < theirs


@pytest.mark.parametrize(
    ("name", "tp_size", "pp_size"),
    all_deep_but(
        3,
        [
            *((name, 2, 2) for name in ONE_OF_EACH),
            ("deepseek-v3-halves", 3, 1),
            ("deepseek-v2-lite", 4, 1),
            ("minicpm3-direct-queries", 1, 2),
        ],
    ),
)
def test_splits(name: str, tp_size: int, pp_size: int, model_dir: ModelDir) -> None:
    path, a, b = model_dir(name), prompt(60, seed=1), prompt(51, seed=2)

    def work(model: CausalLM) -> dict[str, Tensor]:
        return mixed_steps(LaidOut(model, 16), a, b)

    leader, *_ = in_ranks(path, tp_size, pp_size, work)
    assert_same(leader["a"], exact_logits(path, a))
    assert_same(leader["b"], exact_logits(path, b))


def test_every_rank_keeps_the_whole_latent(model_dir: ModelDir) -> None:
    config = ModelConfig.from_dir(model_dir("deepseek-v3"))
    for ranks in (1, 2, 4):
        layout = kv_layout(config, 16, torch.bfloat16, Shard.of(config, ranks - 1, ranks, 1))
        assert layout.page_bytes == 3 * 16 * (64 + 32) * 2
        assert not layout.is_plain
    with pytest.raises(ValueError, match=r"tensor_parallel_size is 3; allowed .*: 1, 2, 4"):
        Shard.of(config, 0, 3, 1)


def test_rounded_weights(model_dir: ModelDir) -> None:
    """A quarter of the tokens' logits stay within 5 % of the plain weights', in norm."""
    path, ids = model_dir("deepseek-v3"), prompt(70)
    exact = oracle_logits(path, ids)
    rounded = LaidOut(load_model(path, quantization="int8"), 16).step({"a": ids})["a"]
    error = ((rounded - exact).norm(dim=1) / exact.norm(dim=1)).quantile(0.25)
    assert 1e-3 < error < 5e-2


@pytest.mark.parametrize("name", ["deepseek-v3", "minicpm3"])
def test_drawn_weights_do_not_depend_on_the_split(name: str, model_dir: ModelDir) -> None:
    path, ids = model_dir(name), prompt(20)

    def logits(model: CausalLM) -> Tensor:
        return LaidOut(model, 16).step({"a": ids})["a"]

    expected = logits(load_model(path, load_format="dummy"))
    assert expected.isfinite().all()
    leader, *_ = in_ranks(path, 2, 2, logits, load_format="dummy")
    assert_same(leader, alike(expected, exact_logits(path, ids)))


def test_every_parameter_has_one_place_in_the_checkpoint(
    model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    for packed in (PackedWeight, PackedExperts):  # packed, they are no parameters
        monkeypatch.setattr(packed, "of", lambda *args, **options: None)
    for name in ("deepseek-v2-lite", "mistral4", "minicpm3"):
        model = load_model(model_dir(name), load_format="dummy")
        for place in model.checkpoint_tensors().values():
            place.tensor.fill_(0)
        for place in model.checkpoint_tensors().values():
            place.tensor.add_(1)
        for parameter, values in model.named_parameters():
            assert (values == 1).all(), f"{name}: {parameter}"


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("deepseek-v3", "model.layers.3.eh_proj.weight"),
        ("glm4-moe-lite", "model.layers.3.shared_head.norm.weight"),
    ],
)
def test_layers_that_draft_are_left_out(name: str, tensor: str, model_dir: ModelDir, tmp_path: Path) -> None:
    path, ids = shutil.copytree(model_dir(name), tmp_path / name), prompt(20)
    file = path / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, tensor: torch.ones(3)}, file, metadata={"format": "pt"})
    assert_same(LaidOut(load_model(path), 16).step({"a": ids})["a"], exact_logits(model_dir(name), ids))
    other = tensor.replace("layers.3", "layers.4")
    save_file({**tensors, other: torch.ones(3)}, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"has no place for tensor {other}"):
        load_model(path)


STACKED = ("deepseek-v2", "deepseek-v3", "deepseek-v3-halves", "mistral4", "minicpm3-direct-queries")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", STACKED)
def test_all_layers_in_one_call_are_what_they_are_one_by_one(
    name: str, dtype: str, model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(model_dir(name), dtype=dtype)
    assert isinstance(model, Decoder)
    assert model.stack is not None
    calls: list[int] = []
    run = LayerStack.run

    def counted(stack: LayerStack, count: int, *rest: Any) -> Tensor:
        calls.append(count)
        return run(stack, count, *rest)

    monkeypatch.setattr(LayerStack, "run", counted)
    a, b = prompt(60, seed=1), prompt(51, seed=2)
    stacked = mixed_steps(LaidOut(model, 16), a, b)
    wanted = LaidOut(model, 16).step_wanted({"a": a[:3], "b": b[:3]}, ["b"])
    assert calls.count(3) >= 4, "steps of decoding rows"
    model.stack = None
    for sequence, logits in mixed_steps(LaidOut(model, 16), a, b).items():
        assert torch.equal(stacked[sequence], logits)
    assert torch.equal(wanted[0], LaidOut(model, 16).step_wanted({"a": a[:3], "b": b[:3]}, ["b"])[0])
