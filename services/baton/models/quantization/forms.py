"""The forms in which checkpoints have quantized weights, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from types import MappingProxyType

from baton.models.quantization.stored import StoredWeight
from baton.models.quantization.weight_spec import WeightSpec

FORMS: Mapping[str, str] = MappingProxyType(
    {
        "fp8": "baton.models.quantization.fp8:tensors",
        "compressed": "baton.models.quantization.compressed:plain_codes",
        "compressed-ints": "baton.models.quantization.compressed:packed_ints",
        "compressed-fp4": "baton.models.quantization.compressed:packed_fp4",
        "gptq": "baton.models.quantization.gptq:tensors",
        "gptq_v2": "baton.models.quantization.gptq:tensors_v2",
        "awq": "baton.models.quantization.awq:tensors",
        "mxfp4": "baton.models.quantization.mxfp4:tensors",
        "modelopt_fp8": "baton.models.quantization.modelopt:fp8",
        "modelopt_nvfp4": "baton.models.quantization.modelopt:nvfp4",
        "modelopt_nvfp4_weight_only": "baton.models.quantization.modelopt:nvfp4_weight_only",
    }
)
"""Name -> module and attribute of a function of a ``WeightSpec`` that describes the tensors."""


def stored_weight(spec: WeightSpec) -> StoredWeight:
    """The tensors that a checkpoint has of each projection that is kept like this."""
    describe: Callable[[WeightSpec], StoredWeight] = resolve_name(FORMS[spec.form])
    return describe(spec)
