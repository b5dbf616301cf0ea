"""Tiny models whose projections are quantized, beside the same models with the weights that are meant."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV3Config, LlamaConfig, Qwen3MoeConfig

from tests.support.tiny_models import Recipe

WEIGHTS = "model.safetensors"
PROJECTION = re.compile(r"model\.layers\..*_proj(_with_mqa)?\.weight")
"""The names of the weights of layers' projections."""

SIZES: Mapping[str, object] = MappingProxyType({"num_hidden_layers": 2, "intermediate_size": 128})
EVEN_MODELS: Mapping[str, Recipe] = MappingProxyType(
    {
        "dense": Recipe(LlamaConfig, {**SIZES, "attention_bias": True}),
        "experts": Recipe(
            Qwen3MoeConfig,
            {
                **SIZES,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 64,
                "head_dim": 16,
            },
        ),
        "latent": Recipe(
            DeepseekV3Config,
            {
                **SIZES,
                "num_key_value_heads": 4,
                "q_lora_rank": 32,
                "kv_lora_rank": 64,
                "qk_nope_head_dim": 16,
                "qk_rope_head_dim": 32,
                "v_head_dim": 16,
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 64,
                "n_group": 2,
                "topk_group": 1,
                "first_k_dense_replace": 1,
            },
        ),
    }
)
"""Models whose projections have inputs by the 32, also of one rank of two."""


class Quantized(NamedTuple):
    """A weight as a checkpoint has it."""

    tensors: Mapping[str, Tensor]
    """The tensors, by the ends of their names ("weight", "weight_scale")."""
    plain: Tensor
    """The weight that they stand for."""


Quantize = Callable[[Tensor], Quantized]
"""A function of a weight [outputs, inputs]."""


@dataclass(frozen=True)
class Pair:
    """A model as it is quantized, and with the weights that are meant."""

    quantized: Path
    plain: Path

    def change(self, edit: Callable[[dict[str, Tensor]], None]) -> None:
        """Edits the tensors of the quantized model."""
        tensors = load_file(self.quantized / WEIGHTS)
        edit(tensors)
        save_file(tensors, self.quantized / WEIGHTS, metadata={"format": "pt"})


def save_pair(
    source: Path,
    target: Path,
    config: Mapping[str, object],
    ways: Mapping[re.Pattern[str], Quantize],
) -> Pair:
    """The model in ``source`` in directories below ``target``. ``config``: its quantization_config. ``ways``:
    how weights are quantized, by their names."""
    pair = Pair(target / "quantized", target / "plain")
    quantized, plain = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in load_file(source / WEIGHTS).items():
        quantize = next((way for names, way in ways.items() if names.fullmatch(name)), None)
        if quantize is not None:
            found = quantize(tensor)
            quantized |= {_named(name, end): part.contiguous() for end, part in found.tensors.items()}
            plain[name] = found.plain.float().contiguous()
        else:
            quantized[name] = plain[name] = tensor
    for path, tensors in ((pair.quantized, quantized), (pair.plain, plain)):
        shutil.copytree(source, path)
        save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
    write_config(pair.quantized, config)
    return pair


def _named(weight: str, end: str) -> str:
    """The name of another tensor of the projection with this ``weight``, which of all experts has no end."""
    if weight.endswith("weight"):
        return weight.removesuffix("weight") + end
    return weight + ("" if end == "weight" else f"_{end.removeprefix('weight_')}")


def write_config(path: Path, config: Mapping[str, object]) -> None:
    """Set the quantization_config of the model in ``path``."""
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": config}))
