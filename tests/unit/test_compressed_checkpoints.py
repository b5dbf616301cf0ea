"""Checkpoints of the package compressed-tensors: weights as the package itself dequantizes them, and models
as transformers computes them with those weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3NextConfig

from baton.models.attention import Attention
from baton.models.base import CausalLM
from baton.models.json_fields import Fields
from baton.models.loader import load_model
from baton.models.methods.compressed import read
from baton.models.quantization.base import LinearShape, LinearWeights, Rows
from baton.models.quantization.checkpoint import CheckpointScheme
from baton.process.options import ModelError
from tests.support import compressed, tiny_models
from tests.support.compressed import RECIPES
from tests.support.deep import all_deep_but
from tests.support.exact import alike, assert_same, exact_logits
from tests.support.laid_out import LaidOut
from tests.support.model_ring import prompt
from tests.support.quantized_models import EVEN_MODELS, PROJECTION, Pair, Quantized, save_pair, write_config
from tests.support.rank_threads import in_ranks
from tests.support.tiny_models import oracle_greedy
from tests.support.tiny_states import GDN

INPUTS = 64


@pytest.fixture(scope="module")
def even_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("even")
    states = {**GDN, "intermediate_size": 128, "head_dim": 32, "mlp_only_layers": [0, 1, 2]}
    models = {**EVEN_MODELS, "states": tiny_models.Recipe(Qwen3NextConfig, states)}
    return lambda name: root / name if (root / name).exists() else models[name](root / name)


def scheme_of(config: Mapping[str, object]) -> CheckpointScheme:
    return CheckpointScheme(read(Fields(config, "config.json", "quantization_config.")), lambda name: (name,))


def loaded(
    config: Mapping[str, object], parts: Mapping[str, Rows], found: Mapping[str, Quantized], inputs: range
) -> LinearWeights:
    """The weights of these rows and inputs of projections."""
    weights = scheme_of(config).allocate(LinearShape(inputs, parts, torch.float32))
    for name, places in weights.places().items():
        for end, place in places.items():
            place.load(found[name].tensors[end])
    return weights


@pytest.mark.parametrize("name", RECIPES)
def test_weights_are_the_packages(name: str) -> None:
    """All of them, and a rank's rows and inputs, in another order."""
    recipe = RECIPES[name]
    generator = torch.Generator().manual_seed(3)
    found = {
        part: recipe.quantize(torch.randn((rows, INPUTS), generator=generator))
        for part, rows in (("q_proj", 48), ("k_proj", 32))
    }
    whole: dict[str, Rows] = {"q_proj": range(48), "k_proj": range(32)}
    expected = torch.cat([weight.plain for weight in found.values()])
    assert expected.dtype == recipe.scale_dtype
    assert torch.equal(
        loaded(recipe.config, whole, found, range(INPUTS)).plain().to(expected.dtype), expected
    )
    some: dict[str, Rows] = {"q_proj": (7, 3, 40, 41), "k_proj": range(12, 20)}
    rows = torch.tensor([7, 3, 40, 41, *range(60, 68)])
    if name.endswith("-asym") or "group" not in str(recipe.weights["strategy"]):
        inputs = range(INPUTS)
    else:
        inputs = range(32, INPUTS)
    part = loaded(recipe.config, some, found, inputs).plain().to(expected.dtype)
    assert torch.equal(part, expected[rows][:, inputs.start :])


def exact(name: str) -> compressed.Recipe:
    """The recipe with scales that are not rounded."""
    return replace(RECIPES[name], scale_dtype=torch.float32)


def pair_of(even_model: Callable[[str], Path], model: str, name: str, path: Path) -> Pair:
    recipe = exact(name)
    return save_pair(even_model(model), path, recipe.config, {PROJECTION: recipe.quantize})


def logits_of(ids: list[int]) -> Callable[[CausalLM], Tensor]:
    return lambda model: LaidOut(model, 16).step({"a": ids})["a"]


@pytest.mark.parametrize(
    ("model", "name"),
    all_deep_but(5, [*(("latent", name) for name in RECIPES), ("dense", "w4a16-asym"), ("experts", "nvfp4")]),
)
def test_models_are_those_of_transformers(
    model: str, name: str, even_model: Callable[[str], Path], tmp_path: Path
) -> None:
    pair, ids = pair_of(even_model, model, name, tmp_path), prompt(40)
    laid = LaidOut(load_model(pair.quantized, "float32"), 16)
    logits = laid.step({"a": ids})["a"]
    assert_same(logits, exact_logits(pair.plain, ids))
    expected, _ = oracle_greedy(pair.plain, ids, 4)
    tokens = [int(logits[-1].argmax())]
    while len(tokens) < len(expected):
        tokens.append(int(laid.step({"a": tokens[-1:]})["a"][-1].argmax()))
    assert tokens == expected


@pytest.mark.parametrize("name", ["fp8-static", "w8a8", "w4a16-asym", "nvfp4"])
def test_two_ranks_compute_what_one_does(
    name: str, even_model: Callable[[str], Path], tmp_path: Path
) -> None:
    pair, logits = pair_of(even_model, "latent", name, tmp_path), logits_of(prompt(20))
    leader, _ = in_ranks(pair.quantized, 2, 1, logits, quantization="auto")
    alone = logits(load_model(pair.quantized, "float32"))
    assert_same(leader, alike(alone, exact_logits(pair.plain, prompt(20))))


def test_groups_may_have_inputs_in_any_order(even_model: Callable[[str], Path], tmp_path: Path) -> None:
    """Checkpoints of old versions of the package: the inputs of a group do not follow each other."""
    recipe = exact("w4a16")
    order = {size: torch.randperm(size, generator=torch.Generator().manual_seed(size)) for size in (64, 128)}

    def quantize(weight: Tensor) -> Quantized:
        own = order[weight.shape[1]]
        found = recipe.quantize(weight[:, own])
        in_order = own.argsort()
        values = (found.tensors["weight_packed"].view(torch.uint8)[:, :, None] >> torch.tensor([0, 4])) & 15
        codes = values.flatten(1)[:, in_order]
        packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
        tensors = {
            **found.tensors,
            "weight_packed": packed.view(torch.int32),
            "weight_g_idx": (in_order // 32).int(),
        }
        return Quantized(tensors, found.plain[:, in_order])

    config = changed(recipe.config, weights(actorder="group"))
    pair, ids = save_pair(even_model("dense"), tmp_path, config, {PROJECTION: quantize}), prompt(20)
    assert_same(logits_of(ids)(load_model(pair.quantized, "float32")), exact_logits(pair.plain, ids))


def test_modules_may_be_kept_in_different_ways(even_model: Callable[[str], Path], tmp_path: Path) -> None:
    """What names a module first counts: the list of ignored ones, a name, an expression, the class. What is
    fused without need is multiplied apart."""
    int8, fp8, nvfp4 = (exact(name) for name in ("w8a8", "fp8-block", "nvfp4"))
    named = "model.layers.1.mlp.down_proj"
    config = {
        **int8.config,
        "format": "mixed-precision",
        "ignore": ["lm_head", "re:.*in_proj_ba$"],
        "config_groups": {
            "group_0": {**int8.group, "format": int8.format},
            "group_1": {**fp8.group, "format": fp8.format, "targets": ["re:.*mlp"]},
            "group_2": {**nvfp4.group, "format": nvfp4.format, "targets": [named]},
        },
    }
    ways = {
        re.compile(re.escape(f"{named}.weight")): nvfp4.quantize,
        re.compile(r".*mlp\..*_proj\.weight"): fp8.quantize,
        re.compile(r".*attn\..*_proj(_qkvz)?\.weight"): int8.quantize,
    }
    pair, ids = save_pair(even_model("states"), tmp_path, config, ways), prompt(20)
    model = load_model(pair.quantized, "float32")
    assert_same(logits_of(ids)(model), exact_logits(pair.plain, ids))
    assert model.scheme.description == (
        "compressed-tensors: fp4 by 16; fp8 by 16x32, activations fp8-group; "
        "int8 by row, activations int8-row"
    )


def without_scale(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.0.mlp.up_proj.weight_global_scale"]


def with_no_divisor(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.0.mlp.up_proj.weight_global_scale"].zero_()


def with_nan_scale(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.0.mlp.up_proj.weight_scale"].view(torch.uint8)[1, 1] = 0x7F


def with_other_codes(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.0.mlp.up_proj.weight_packed"] = torch.zeros(64, 8, dtype=torch.uint8)


def with_stranger(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.0.mlp.up_proj.weight_zero_point"] = torch.zeros(128, 4, dtype=torch.int8)


TENSORS: Mapping[str, tuple[Callable[[dict[str, Tensor]], None], str]] = {
    "missing": (without_scale, "tensor model.layers.0.mlp.up_proj.weight_global_scale is missing"),
    "zero": (with_no_divisor, "up_proj.weight_global_scale: the scale is 0; allowed: other numbers"),
    "nan": (with_nan_scale, "up_proj.weight_scale: a scale is not a finite number; allowed: finite numbers"),
    "shape": (with_other_codes, "up_proj.weight_packed has shape [64, 8]; expected [128, 32]"),
    "stranger": (with_stranger, "has no place for tensor model.layers.0.mlp.up_proj.weight_zero_point"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_bad_tensors_are_named(case: str, even_model: Callable[[str], Path], tmp_path: Path) -> None:
    edit, message = TENSORS[case]
    pair = pair_of(even_model, "dense", "nvfp4", tmp_path)
    pair.change(edit)
    with pytest.raises(ModelError, match=re.escape(message)) as error:
        load_model(pair.quantized, "float32")
    assert "\n" not in str(error.value)


def weights(**fields: object) -> dict[str, Any]:
    """A change of the weights of the group."""
    return {"config_groups": {"group_0": {"weights": fields}}}


GROUP = "config.json: quantization_config.config_groups.group_0."
CONFIGS: Mapping[str, tuple[str, dict[str, Any], str]] = {
    "format": ("w4a16", {"format": "marlin-24"}, 'format is "marlin-24"; allowed: float-quantized, int-'),
    "no groups": ("w4a16", {"config_groups": None}, "config_groups is missing; needed: an object with at"),
    "bits": ("w4a16", weights(num_bits=3), GROUP + "weights.num_bits is 3; allowed: 4 or 8"),
    "type": ("w4a16", weights(type="float"), GROUP + 'weights.type is "float"; allowed: "int"'),
    "group": ("w4a16", weights(group_size=0), GROUP + "weights.group_size is 0; allowed: a whole number"),
    "nv group": ("nvfp4", weights(group_size=32), GROUP + "weights.group_size is 32; allowed: 16"),
    "blocks": (
        "w8a8",
        weights(strategy="block"),
        'weights.strategy has "block"; allowed: tensor, channel, group',
    ),
    "block": (
        "fp8-block",
        weights(block_structure=[8]),
        "block_structure is [8]; allowed: a list of two whole",
    ),
    "symmetric": ("mxfp4", weights(symmetric=False), "weights.symmetric is false; allowed: true"),
    "dynamic": ("w8a8", weights(dynamic=True), "weights.dynamic is true; allowed: false"),
    "order": ("w8a8", weights(actorder="group"), 'weights.actorder is "group"; allowed: null'),
    "class": (
        "w8a8",
        {"config_groups": {"group_0": {"targets": ["LlamaMLP"]}}},
        GROUP + 'targets has "LlamaMLP"; allowed: "Linear", names of modules, and "re:" in front of them',
    ),
    "expression": (
        "w8a8",
        {"ignore": ["re:(a"]},
        'ignore has "re:(a"; allowed: regular expressions (missing )',
    ),
    "outputs": (
        "w8a8",
        {"config_groups": {"group_0": {"output_activations": {"num_bits": 8}}}},
        GROUP + 'output_activations is {"num_bits": 8}; allowed: null',
    ),
    "no weights": ("w8a8", {"config_groups": {"group_0": {"weights": None}}}, GROUP + "weights is missing"),
    "mixed": ("w8a8", {"format": "mixed-precision"}, GROUP + "format is missing; needed: float-quantized"),
    "sparse": ("w8a8", {"sparsity_config": {"format": "sparse-24-bitmask"}}, 'allowed: "dense"'),
    "transforms": ("w8a8", {"transform_config": {"config_groups": {}}}, "transform_config is"),
    "kv": (
        "w8a8",
        {"kv_cache_scheme": {"num_bits": 8, "type": "int"}},
        'kv_cache_scheme.type is "int"; allowed',
    ),
    "kv heads": (
        "w8a8",
        {"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "attn_head"}},
        'kv_cache_scheme.strategy is "attn_head"; allowed: "tensor"',
    ),
}


def changed(config: dict[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """The object with these fields, those of objects in it alone where both have one."""
    nested = {
        name: changed(config[name], value)
        for name, value in change.items()
        if isinstance(value, dict) and isinstance(config.get(name), dict)
    }
    return {**config, **change, **nested}


@pytest.mark.parametrize("case", CONFIGS)
def test_what_is_not_served_is_refused_by_name(case: str) -> None:
    name, change, message = CONFIGS[case]
    with pytest.raises(ModelError, match=re.escape(message)):
        scheme_of(changed(RECIPES[name].config, change))


@pytest.mark.parametrize(
    ("name", "rounding"),
    [
        ("fp8-static", "fp8-tensor"),
        ("fp8-dynamic", "fp8-row"),
        ("fp8-block", "fp8-group"),
        ("w8a8", "int8-row"),
        ("w4a16", "none"),
        ("nvfp4", "none"),
        ("mxfp8", "none"),
    ],
)
def test_activations_are_rounded_as_the_config_says(name: str, rounding: str) -> None:
    spec = read(Fields(RECIPES[name].config, "config.json")).spec_of("model.layers.0.mlp.up_proj")
    assert spec is not None and spec.rounding == rounding


def test_kv_scales_are_read(even_model: Callable[[str], Path], tmp_path: Path) -> None:
    pair = pair_of(even_model, "dense", "fp8-dynamic", tmp_path)
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    write_config(pair.quantized, {**RECIPES["fp8-dynamic"].config, "kv_cache_scheme": cache})
    layer = "model.layers.1.self_attn"
    pair.change(
        lambda tensors: tensors.update(
            {
                f"{layer}.k_scale": torch.tensor([0.5]),
                f"{layer}.v_proj.output_scale": torch.tensor([0.125]),
                f"{layer}.k_zero_point": torch.tensor([0], dtype=torch.int8),
            }
        )
    )
    model = load_model(pair.quantized, "float32")
    scales = [module.kv_scales.tolist() for module in model.modules() if isinstance(module, Attention)]
    assert scales == [[1, 1], [0.5, 0.125]]
