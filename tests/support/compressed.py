"""Weights quantized by the package compressed-tensors, the reference of its formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.compressors.mx_utils import decompress_mx_scale
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from torch import Tensor

from tests.support.quantized_models import Quantized

VERSION = "0.20.0"
"""The version of the package that the tests were written with."""


@dataclass(frozen=True)
class Recipe:
    """How weights are quantized, and written down."""

    format: str
    weights: dict[str, object]
    activations: dict[str, object] | None = None
    scale_dtype: torch.dtype = torch.bfloat16
    """The type of the model when it was quantized."""

    @property
    def group(self) -> dict[str, object]:
        """The entry of config_groups."""
        return {"targets": ["Linear"], "weights": self.weights, "input_activations": self.activations}

    @property
    def config(self) -> dict[str, Any]:
        """The quantization_config."""
        return {
            "quant_method": "compressed-tensors",
            "version": VERSION,
            "format": self.format,
            "quantization_status": "compressed",
            "config_groups": {"group_0": self.group},
            "ignore": ["lm_head", r"re:.*mlp\.gate$"],
            "kv_cache_scheme": None,
            "sparsity_config": {},
            "transform_config": {},
        }

    def quantize(self, weight: Tensor) -> Quantized:
        """The tensors of the weight [outputs, inputs], and what the package makes of them."""
        scheme = QuantizationScheme(**self.group)
        args, whole = scheme.weights, weight.to(self.scale_dtype)
        blocks = _blocks(whole, args)
        low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
        state = {"weight": whole}
        divisor = None
        if args.strategy == "tensor_group":
            state["weight_global_scale"] = divisor = generate_gparam(low.amin(), high.amax())
            state["input_global_scale"] = torch.tensor([3.0])
        scales, zeros = calculate_qparams(low, high, args, divisor)
        shape = (1,) if args.strategy == "tensor" else scales.shape
        state["weight_scale"] = scales.reshape(shape)
        state["weight_zero_point"] = zeros.reshape(shape)
        if scheme.input_activations is not None and scheme.input_activations.dynamic is False:
            state["input_scale"] = torch.tensor([0.02])
        compressor = BaseCompressor.get_value_from_registry(self.format)
        tensors = compressor.compress(state, scheme)
        if args.num_bits == 4 and args.type == "float":
            return Quantized(tensors, _fp4_values(tensors, args, self.scale_dtype))
        return Quantized(tensors, compressor.decompress(tensors, scheme)["weight"])


def _fp4_values(tensors: Mapping[str, Tensor], args: QuantizationArgs, dtype: torch.dtype) -> Tensor:
    """What the package's decompress yields, which rounds to bfloat16 whatever the model's type is."""
    packed, scales = tensors["weight_packed"], tensors["weight_scale"]
    scales = decompress_mx_scale(scales) if scales.dtype == torch.uint8 else scales
    codes = unpack_fp4_from_uint8(packed, len(packed), 2 * packed.shape[1], torch.float32)
    divisor = tensors.get("weight_global_scale")
    values: Tensor = dequantize(codes, scales.float(), args=args, global_scale=divisor)
    return values.to(dtype)


def _blocks(weight: Tensor, args: QuantizationArgs) -> Tensor:
    """The weight as [blocks, outputs of each, blocks, inputs of each]."""
    outputs, inputs = weight.shape
    match args.strategy:
        case "tensor":
            rows, columns = outputs, inputs
        case "channel":
            rows, columns = 1, inputs
        case "block":
            rows, columns = args.block_structure
        case _:
            rows, columns = 1, args.group_size
    return weight.view(outputs // rows, rows, inputs // columns, columns)


FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True}
FLOAT4 = {"num_bits": 4, "type": "float", "symmetric": True}
BY_ROW = {"strategy": "channel"}
BY_GROUP = {"strategy": "group", "group_size": 32}
BY_TOKEN = {"strategy": "token", "dynamic": True}
MX = {**BY_GROUP, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
NV = {
    "strategy": "tensor_group",
    "group_size": 16,
    "scale_dtype": "torch.float8_e4m3fn",
    "zp_dtype": "torch.float8_e4m3fn",
}

RECIPES = {
    "fp8-static": Recipe(
        "float-quantized",
        {**FLOAT8, "strategy": "tensor"},
        {**FLOAT8, "strategy": "tensor", "dynamic": False},
    ),
    "fp8-dynamic": Recipe("float-quantized", {**FLOAT8, **BY_ROW}, {**FLOAT8, **BY_TOKEN}),
    "fp8-block": Recipe(
        "float-quantized",
        {**FLOAT8, "strategy": "block", "block_structure": [16, 32]},
        {**FLOAT8, "strategy": "group", "group_size": 32, "dynamic": True},
        torch.float32,
    ),
    "w8a8": Recipe("int-quantized", {**INT8, **BY_ROW}, {**INT8, **BY_TOKEN}),
    "w8a8-asym": Recipe("int-quantized", {**INT8, **BY_ROW, "symmetric": False}, {**INT8, **BY_TOKEN}),
    "w4a16": Recipe("pack-quantized", {**INT4, **BY_GROUP}, None, torch.float16),
    "w4a16-asym": Recipe("pack-quantized", {**INT4, **BY_GROUP, "symmetric": False, "group_size": 16}),
    "w8a16": Recipe("pack-quantized", {**INT8, **BY_ROW}),
    "w8a16-asym": Recipe("pack-quantized", {**INT8, **BY_GROUP, "symmetric": False}),
    "nvfp4": Recipe("nvfp4-pack-quantized", {**FLOAT4, **NV}, {**FLOAT4, **NV, "dynamic": "local"}),
    "mxfp4": Recipe("mxfp4-pack-quantized", {**FLOAT4, **MX}),
    "mxfp8": Recipe("mxfp8-quantized", {**FLOAT8, **MX}),
}
"""Formats that the package writes, by what people call them."""
