"""The quantization schemes by name. Imports no torch, so that a bad option is refused at once."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

Quantization = Literal["none", "int8"]
"""The names of the schemes. int8: each row has a scale of its own, multiplied with activations of the model's
type."""

SCHEMES: Mapping[Quantization, str] = MappingProxyType(
    {
        "none": "baton.models.quantization.plain:PLAIN",
        "int8": "baton.models.quantization.int8:INT8",
    }
)
"""Name -> module and attribute of the ``QuantizationScheme``, which is imported when it is used."""
