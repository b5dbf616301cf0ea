"""FP8 checkpoints as transformers, DeepSeek and Qwen publish them, against transformers with the weights that
they stand for."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers import Qwen3_5MoeTextConfig
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

from baton.models.attention import Attention
from baton.models.base import CausalLM
from baton.models.config import ModelConfig
from baton.models.decoder import Decoder
from baton.models.loader import load_model
from baton.process.options import ModelError
from tests.support.exact import alike, assert_same, exact_logits
from tests.support.laid_out import LaidOut
from tests.support.model_ring import prompt
from tests.support.quantized_models import EVEN_MODELS, PROJECTION, Pair, Quantized, save_pair, write_config
from tests.support.rank_threads import in_ranks
from tests.support.tiny_models import Recipe, oracle_greedy
from tests.support.tiny_states import GDN

BLOCK = [32, 32]
DYNAMIC: Mapping[str, object] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BLOCKS = {**DYNAMIC, "weight_block_size": BLOCK}
STATIC = {**DYNAMIC, "activation_scheme": "static"}
GATES = {"modules_to_not_convert": ["linear_attn.in_proj_a", "linear_attn.in_proj_b"]}
POWERS = {**BLOCKS, "scale_fmt": "ue8m0"}
FUSED = re.compile(
    PROJECTION.pattern + r"|.*experts\.(gate_up|down)_proj|.*linear_attn\.(in_proj_(qkv|z)|out_proj)\.weight"
)
"""The projections of Qwen3.5, whose decays and betas are left plain."""


class Reference:
    """Quantizes as transformers does."""

    def __init__(self, config: Mapping[str, object]) -> None:
        described = SimpleNamespace(
            weight_block_size=config.get("weight_block_size"), scale_fmt=config.get("scale_fmt")
        )
        quantizer = SimpleNamespace(quantization_config=described)
        self._quantize = Fp8Quantize(quantizer)  # type: ignore[no-untyped-call]
        self._dequantize = Fp8Dequantize(quantizer)  # type: ignore[no-untyped-call]
        self._is_static = config["activation_scheme"] == "static"

    def __call__(self, weight: Tensor) -> Quantized:
        found = self._quantize._quantize_one("weight", weight)
        codes, scales = found["weight"], found["weight_scale_inv"]
        plain = self._dequantize._dequantize_one(codes, scales, torch.float32)
        tensors = {"weight": codes, "weight_scale_inv": scales}
        if self._is_static:
            tensors["activation_scale"] = torch.full(weight.shape[:-2], 0.1)
        return Quantized(tensors, plain)


def quantized(source: Path, target: Path, config: Mapping[str, object]) -> Pair:
    return save_pair(source, target, config, {FUSED: Reference(config)})


@pytest.fixture(scope="module")
def even_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("even")
    fused = {**GDN, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    fused |= {"shared_expert_intermediate_size": 64, "head_dim": 16}
    models = {**EVEN_MODELS, "fused": Recipe(Qwen3_5MoeTextConfig, fused)}
    return lambda name: root / name if (root / name).exists() else models[name](root / name)


CASES = {
    "dense": ("dense", BLOCKS),
    "latent": ("latent", BLOCKS),
    "powers": ("latent", POWERS),
    "tensor": ("latent", DYNAMIC),
    "static": ("experts", STATIC),
    "fused": ("fused", {**BLOCKS, **GATES}),
    "fused-static": ("fused", {**STATIC, **GATES}),
}


@pytest.mark.parametrize("case", CASES)
def test_models_are_those_of_transformers(
    case: str, even_model: Callable[[str], Path], tmp_path: Path
) -> None:
    name, config = CASES[case]
    pair = quantized(even_model(name), tmp_path, config)
    model, ids = load_model(pair.quantized, "float32"), prompt(40)
    assert model.scheme.description.startswith("fp8: fp8 by ")
    laid = LaidOut(model, 16)
    logits = laid.step({"a": ids})["a"]
    assert_same(logits, exact_logits(pair.plain, ids))
    expected, _ = oracle_greedy(pair.plain, ids, 6)
    tokens = [int(logits[-1].argmax())]
    while len(tokens) < len(expected):
        tokens.append(int(laid.step({"a": tokens[-1:]})["a"][-1].argmax()))
    assert tokens == expected


@pytest.mark.parametrize("case", ["dense", "latent", "fused"])
def test_two_ranks_compute_what_one_does(
    case: str, even_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Blocks of 32 rows, and 16 of them on each rank where a head has as many."""
    name, config = CASES[case]
    pair, ids = quantized(even_model(name), tmp_path, config), prompt(20)

    def logits(model: CausalLM) -> Tensor:
        return LaidOut(model, 16).step({"a": ids})["a"]

    leader, _ = in_ranks(pair.quantized, 2, 1, logits, quantization="auto")
    alone = logits(load_model(pair.quantized, "float32"))
    assert_same(leader, alike(alone, exact_logits(pair.plain, ids)))


def test_other_names_mean_the_same(even_model: Callable[[str], Path], tmp_path: Path) -> None:
    """Scales as vLLM names them, and scales of K and V."""
    config = {**STATIC, "ignored_layers": ["lm_head"], "kv_cache_scheme": "static"}
    pair, ids = quantized(even_model("dense"), tmp_path, config), prompt(20)
    layer = "model.layers.{}.self_attn"

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            for usual, other in (("weight_scale_inv", "weight_scale"), ("activation_scale", "input_scale")):
                if name.endswith(usual):
                    tensors[name.replace(usual, other)] = tensors.pop(name)
        tensors[f"{layer.format(0)}.k_proj.k_scale"] = torch.tensor([0.25])
        tensors[f"{layer.format(0)}.v_proj.v_scale"] = torch.tensor(0.5)
        tensors[f"{layer.format(1)}.kv_scale"] = torch.tensor(2.0)

    pair.change(rename)
    model = load_model(pair.quantized, "float32")
    assert_same(LaidOut(model, 16).step({"a": ids})["a"], exact_logits(pair.plain, ids))
    scales = [module.kv_scales.tolist() for module in model.modules() if isinstance(module, Attention)]
    assert scales == [[0.25, 0.5], [2.0, 2.0]]


def test_latents_may_have_scales(even_model: Callable[[str], Path], tmp_path: Path) -> None:
    pair = quantized(even_model("latent"), tmp_path, BLOCKS)
    pair.change(lambda tensors: tensors.update({"model.layers.1.self_attn.attn.k_scale": torch.tensor(3.0)}))
    model = load_model(pair.quantized, "float32")
    assert isinstance(model, Decoder)
    assert [layer.mixers[0].kv_scales.tolist() for layer in model.layers.values()] == [[1, 1], [3, 1]]


@pytest.mark.parametrize(
    ("listed", "plain"),
    [
        (["mlp"], ["model.layers.0.mlp.down_proj"]),
        (["down_proj"], ["model.layers.1.mlp.down_proj"]),
        (["model.layers.1"], ["model.layers.1.mlp.down_proj"]),
        ([r"model.layers.\d.mlp"], ["model.layers.0.mlp.down_proj"]),
        (["n_proj"], ["model.layers.0.mlp.down_proj"]),
        (["lm_head", "model.layers.10"], []),
    ],
)
def test_lists_name_modules_as_in_transformers(
    listed: list[str], plain: list[str], even_model: Callable[[str], Path], tmp_path: Path
) -> None:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text((even_model("dense") / "config.json").read_text())
    write_config(path, {**BLOCKS, "modules_to_not_convert": listed})
    found = ModelConfig.from_dir(path).quantization
    assert found is not None and found.spec_of("lm_head") is None
    for name in plain:
        assert found.spec_of(name) is None
    assert found.spec_of("model.layers.11.self_attn.q_proj") is not None


def half_plain(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.0.self_attn.v_proj.weight_scale_inv"]


def with_nan(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.0.mlp.up_proj.weight_scale_inv"][0, 0] = float("nan")


def with_nan_code(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.0.mlp.up_proj.weight"].view(torch.uint8)[3, 3] = 0xFF


def with_other_shape(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.0.mlp.up_proj.weight_scale_inv"] = torch.ones(3, 2)


def with_bad_scale(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.0.self_attn.k_scale"] = torch.tensor(0.0)


REFUSALS: dict[str, tuple[Callable[[dict[str, Tensor]], None] | Mapping[str, object], str]] = {
    "missing": (half_plain, "tensor model.layers.0.self_attn.v_proj.weight_scale_inv is missing"),
    "nan": (with_nan, "up_proj.weight_scale_inv: a scale is not a finite number; allowed: finite numbers"),
    "nan code": (with_nan_code, "up_proj.weight: a weight is nan; allowed: numbers"),
    "shape": (with_other_shape, "up_proj.weight_scale_inv has shape [3, 2]; expected [4, 2]"),
    "kv": (with_bad_scale, "self_attn.k_scale: the scale is 0; allowed: a finite number above 0"),
    "half": (
        {"modules_to_not_convert": ["model.layers.1.self_attn.k_proj"]},
        "model.layers.1.self_attn.q_proj is fp8 by 32x32, activations fp8-group, "
        "model.layers.1.self_attn.k_proj is plain; allowed for weights that are computed as one: the same",
    ),
    "half gate": ({"modules_to_not_convert": ["up_proj"]}, "mlp.up_proj is plain; allowed for weights"),
    "block": ({"weight_block_size": [32, 0]}, "weight_block_size is [32, 0]; allowed: a list of two whole"),
    "groups": ({"weight_block_size": [32, 48]}, "q_proj has groups of 48 inputs; allowed for inputs 0 to 64"),
    "scheme": ({"activation_scheme": "none"}, 'activation_scheme is "none"; allowed: "dynamic" or "static"'),
    "list": ({"modules_to_not_convert": ["(a"]}, 'modules_to_not_convert has "(a"; allowed: regular expr'),
    "embedding": ({"modules_to_convert": ["embed"]}, "modules_to_convert is"),
    "fmt": ({"fmt": "e5m2"}, 'fmt is "e5m2"; allowed: "e4m3"'),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_name_tensor_and_field(case: str, even_model: Callable[[str], Path], tmp_path: Path) -> None:
    edit, message = REFUSALS[case]
    pair = quantized(even_model("dense"), tmp_path, BLOCKS)
    if callable(edit):
        pair.change(edit)
    else:
        write_config(pair.quantized, {**BLOCKS, **edit})
    with pytest.raises(ModelError, match=re.escape(message)) as error:
        load_model(pair.quantized, "float32")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_scales_of_activations_are_above_0(
    scale: float, even_model: Callable[[str], Path], tmp_path: Path
) -> None:
    pair, name = (
        quantized(even_model("dense"), tmp_path, STATIC),
        "model.layers.0.mlp.up_proj.activation_scale",
    )
    pair.change(lambda tensors: tensors.update({name: torch.tensor(scale)}))
    message = f"tensor {name}: the scale is {scale:g}; allowed: a finite number above 0"
    with pytest.raises(ModelError, match=re.escape(message)):
        load_model(pair.quantized, "float32")


def test_a_latent_projection_may_be_plain(even_model: Callable[[str], Path], tmp_path: Path) -> None:
    """What is fused without need is multiplied apart."""
    config = {**BLOCKS, "modules_to_not_convert": ["kv_a_proj_with_mqa"]}
    chosen = re.compile(r"model\.layers\..*_proj\.weight")
    pair, ids = save_pair(even_model("latent"), tmp_path, config, {chosen: Reference(config)}), prompt(20)

    def logits(model: CausalLM) -> Tensor:
        return LaidOut(model, 16).step({"a": ids})["a"]

    assert_same(logits(load_model(pair.quantized, "float32")), exact_logits(pair.plain, ids))
