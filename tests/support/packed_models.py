"""Tiny models whose weights are quantized as published checkpoints are, beside the same models with the plain
weights that they stand for. Written from the formats' descriptions, apart from what loads them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from types import MappingProxyType

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV3Config, GptOssConfig, LlamaConfig, MixtralConfig, Qwen3MoeConfig

from tests.support.tiny_models import Recipe

DENSE = Recipe(LlamaConfig, {"num_hidden_layers": 2, "intermediate_size": 128})
MIXTRAL = Recipe(
    MixtralConfig,
    {"num_hidden_layers": 2, "intermediate_size": 64, "num_local_experts": 3, "num_experts_per_tok": 2},
)
QWEN_MOE = Recipe(
    Qwen3MoeConfig,
    {
        "num_hidden_layers": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "head_dim": 16,
    },
)
LATENT = Recipe(
    DeepseekV3Config,
    {
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 32,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "n_group": 1,
        "topk_group": 1,
        "intermediate_size": 128,
    },
)
GPT_OSS = Recipe(
    GptOssConfig,
    {
        "num_hidden_layers": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 64,
        "head_dim": 16,
        "sliding_window": 21,
    },
)


@dataclass(frozen=True)
class Packed:
    """A weight in a checkpoint's tensors."""

    tensors: Mapping[str, Tensor]
    """End of each tensor's name -> the tensor."""
    stands_for: Tensor
    """[outputs, inputs] float32."""


Pack = Callable[[Tensor], Packed]
"""A function that quantizes a weight [outputs, inputs]."""
PLAIN = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "block_sparse_moe.gate.", "router")
"""Parts of the names of tensors that every method leaves plain."""


def save_packed(
    plain: Path,
    pack: Pack,
    config: Mapping[str, object],
    left: tuple[str, ...] = (),
    others: Mapping[str, Pack] = MappingProxyType({}),
) -> tuple[Path, Path]:
    """The model in ``plain`` with its matrices packed, and with the weights that these stand for: two new
    directories beside it. ``left``: parts of the names of matrices that stay plain; ``others``: names of
    modules that are packed in other ways. Tensors of all experts are packed as matrices [outputs, inputs],
    into which they are transposed."""
    tensors, weights = dict[str, Tensor](), load_file(plain / "model.safetensors")
    for name, weight in weights.items():
        if weight.dim() < 2 or name.endswith("_bias") or any(part in name for part in (*PLAIN, *left)):
            tensors[name] = weight
        elif weight.dim() == 2:
            module = name.removesuffix(".weight")
            done = others.get(module, pack)(weight)
            tensors |= {f"{module}.{end}": tensor for end, tensor in done.tensors.items()}
            weights[name] = done.stands_for
        else:
            done = pack(weight.mT)
            tensors |= {f"{name}_{end}": tensor for end, tensor in done.tensors.items()}
            weights[name] = done.stands_for.mT
    packed, meant = copied(plain), copied(plain)
    write(packed, tensors)
    write(meant, weights)
    change_config(packed, quantization_config=config)
    return packed, meant


def copied(path: Path) -> Path:
    """The model in a new directory beside it."""
    return Path(shutil.copytree(path, mkdtemp(dir=path.parent), dirs_exist_ok=True))


def change_config(path: Path, **fields: object) -> None:
    """Give fields of config.json other values; None: take them out."""
    described = json.loads((path / "config.json").read_text()) | fields
    kept = {name: value for name, value in described.items() if value is not None}
    (path / "config.json").write_text(json.dumps(kept))


def write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Save the tensors as the model's weights."""
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, path / "model.safetensors", metadata={"format": "pt"})


def add_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Add tensors to the checkpoint."""
    write(path, {**load_file(path / "model.safetensors"), **tensors})


def change_tensor(path: Path, name: str, change: Callable[[Tensor], Tensor | None]) -> Path:
    """Replace a tensor of the checkpoint; None: take it out. Returns the path."""
    tensors = load_file(path / "model.safetensors")
    found = change(tensors.pop(name))
    write(path, tensors if found is None else tensors | {name: found})
    return path


def words(codes: Tensor, bits: int) -> Tensor:
    """[n * 32 / bits, ...] whole numbers -> [n, ...] int32: a word has so many rows, the first in the lowest
    bits."""
    each = 32 // bits
    parts = codes.long().reshape(-1, each, *codes.shape[1:])
    word = sum(parts[:, place] << bits * place for place in range(each))
    assert isinstance(word, Tensor)
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)


def to_groups(weight: Tensor, groups: Tensor, bits: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The weight [outputs, inputs] in codes [outputs, inputs], scales [outputs, groups] float16 and zero
    points [outputs, groups]. ``groups`` [inputs]: the group of each input."""
    most = 2**bits - 1
    codes = torch.empty(weight.shape, dtype=torch.int64)
    number = int(groups.max()) + 1
    scales, zeros = torch.empty(len(weight), number).half(), torch.empty(len(weight), number).long()
    for group in range(number):
        part = weight[:, groups == group]
        least, top = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if symmetric:
            top = torch.maximum(top, -least)
            least = -top
        scale = ((top - least) / most).half()
        zero = torch.full_like(top, 2 ** (bits - 1)) if symmetric else (-least / scale.float()).round()
        scaled = (part / scale.float()[:, None]).round() + zero[:, None]
        codes[:, groups == group] = scaled.clamp(0, most).long()
        scales[:, group], zeros[:, group] = scale, zero.clamp(0, most).long()
    return codes, scales, zeros


def of_groups(codes: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor) -> Tensor:
    """The weight that codes of groups stand for."""
    return (codes - zeros[:, groups]).float() * scales.float()[:, groups]


def gptq(
    weight: Tensor,
    *,
    bits: int = 4,
    group: int | None = 32,
    symmetric: bool = True,
    version: int = 1,
    order: torch.Generator | None = None,
) -> Packed:
    """``order`` draws the groups of inputs, as the order of activations would give them; None: as they
    follow each other."""
    inputs = weight.shape[1]
    groups = torch.arange(inputs) // (group or inputs)
    if order is not None:
        groups = groups[torch.randperm(inputs, generator=order)]
    codes, scales, zeros = to_groups(weight, groups, bits, symmetric)
    zero_words = words(zeros, bits).mT
    if version == 1:
        zero_words = words(torch.ones_like(zeros), bits).mT.neg() + zero_words
    tensors = {
        "qweight": words(codes.mT, bits),
        "qzeros": zero_words,
        "scales": scales.mT,
        "g_idx": groups.int(),
    }
    return Packed(tensors, of_groups(codes, scales, zeros, groups))


AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def awq(weight: Tensor, *, group: int = 32, symmetric: bool = False) -> Packed:
    """The columns of each word in AWQ's order, from the lowest bits."""
    groups = torch.arange(weight.shape[1]) // group
    codes, scales, zeros = to_groups(weight, groups, 4, symmetric)

    def in_order(rows: Tensor) -> Tensor:
        return words(rows.reshape(-1, 8, rows.shape[1])[:, AWQ_ORDER].flatten(0, 1), 4).mT

    tensors = {"qweight": in_order(codes), "qzeros": in_order(zeros), "scales": scales.mT}
    return Packed(tensors, of_groups(codes, scales, zeros, groups))


FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def to_fp4(scaled: Tensor) -> Tensor:
    """The nearest numbers of fp4, as codes."""
    nearest = (scaled.abs().unsqueeze(-1) - FP4).abs().argmin(-1)
    return (nearest + 8 * (scaled < 0)).to(torch.uint8)


def of_fp4(codes: Tensor) -> Tensor:
    """What codes of fp4 stand for."""
    return torch.where(codes >= 8, -FP4[codes.long() % 8], FP4[codes.long() % 8])


def in_octets(codes: Tensor) -> Tensor:
    """[..., 2 n] codes of half a byte -> [..., n]: the first of two in the low half."""
    return codes[..., ::2] + 16 * codes[..., 1::2]


def mxfp4(weight: Tensor) -> Packed:
    """Rows [..., rows, inputs] in groups of 32; scales are powers of two."""
    parts = weight.reshape(*weight.shape[:-1], -1, 32)
    exponents = (parts.abs().amax(-1, keepdim=True) / 6).log2().ceil()
    codes = to_fp4(parts / exponents.exp2())
    tensors = {"blocks": in_octets(codes), "scales": (exponents + 127).to(torch.uint8).squeeze(-1)}
    return Packed(tensors, (of_fp4(codes) * exponents.exp2()).flatten(-2))


def nvfp4(weight: Tensor, *, weight_only: bool = False) -> Packed:
    """Groups of 16 with a scale of fp8, and a factor for all."""
    parts = weight.reshape(*weight.shape[:-1], -1, 16)
    factor = weight.abs().max() / (6 * 448)
    scales = (parts.abs().amax(-1) / 6 / factor).to(torch.float8_e4m3fn)
    each = (scales.float() * factor).unsqueeze(-1)
    codes = to_fp4(parts / each)
    tensors = {"weight": in_octets(codes.flatten(-2)), "weight_scale": scales, "weight_scale_2": factor}
    if not weight_only:
        tensors["input_scale"] = torch.tensor(0.01)
    return Packed(tensors, (of_fp4(codes) * each).flatten(-2))


def fp8(weight: Tensor) -> Packed:
    """One scale for all."""
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    tensors = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.02)}
    return Packed(tensors, codes.float() * scale)


def fp8_rows(weight: Tensor) -> Packed:
    """A scale for each output."""
    scale = weight.abs().amax(1) / 448
    codes = (weight / scale[:, None]).to(torch.float8_e4m3fn)
    return Packed({"weight": codes, "weight_scale": scale}, codes.float() * scale[:, None])


def fp8_blocks(weight: Tensor, size: int) -> Packed:
    """A scale for each block of so many outputs and inputs, [blocks, 1, blocks, 1]."""
    rows, inputs = weight.shape
    blocks = weight.reshape(rows // size, size, inputs // size, size)
    scale = blocks.abs().amax((1, 3), keepdim=True) / 448
    codes = (blocks / scale).to(torch.float8_e4m3fn)
    stands_for = (codes.float() * scale).flatten(2).flatten(0, 1)
    return Packed({"weight": codes.flatten(2).flatten(0, 1), "weight_scale": scale}, stands_for)
