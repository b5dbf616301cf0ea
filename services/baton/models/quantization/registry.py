"""The quantization schemes by name. Imports no torch, so that a bad option is refused at once."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

Quantization = Literal["auto", "none", "int8", "fp8"]
"""The names of the schemes. auto: as the checkpoint has them. int8, fp8: each row has a scale of its own,
multiplied with activations of the model's type."""

SCHEMES: Mapping[Quantization, str] = MappingProxyType(
    {
        "none": "baton.models.quantization.plain:PLAIN",
        "int8": "baton.models.quantization.rounded:INT8",
        "fp8": "baton.models.quantization.rounded:FP8",
    }
)
"""Name -> module and attribute of the ``QuantizationScheme`` of a plain checkpoint's weights, which is
imported when it is used."""

METHODS: Mapping[str, str] = MappingProxyType(
    {
        "fp8": "baton.models.methods.fp8:read",
        "compressed-tensors": "baton.models.methods.compressed:read",
        "gptq": "baton.models.methods.gptq:read",
        "awq": "baton.models.methods.awq:read",
        "mxfp4": "baton.models.methods.mxfp4:read",
        "modelopt": "baton.models.methods.modelopt:read",
    }
)
"""The quant_method of a checkpoint's quantization_config -> module and attribute of the function that reads
it, from its fields to a ``QuantizedCheckpoint``."""
