"""The model families by ``architectures[0]``: where each family's module is, and how its config.json departs
from Llama's. Imports no torch: the router uses it too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from baton.models.json_fields import Fields
from baton.models.sliding_windows import no_windows, one_window, windows_by_layer_type


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """One architecture. A bias that is a string names the flag in config.json that says whether the bias
    exists (missing: it does not)."""

    model: str = "baton.models.llama:LlamaForCausalLM"
    """Module and attribute of the ``CausalLM``, which is imported when a model is loaded."""
    qkv_bias: bool | str = "attention_bias"
    """Biases on the q, k and v projections."""
    o_bias: bool | str = "attention_bias"
    """Bias on the output projection."""
    mlp_bias: bool | str = False
    """Biases on the projections of the MLP."""
    default_head_dim: int | None = None
    """The value for a missing ``head_dim``; None: hidden_size / num_attention_heads."""
    default_kv_heads: int | None = None
    """The value for a missing ``num_key_value_heads``; None: the number of heads."""
    windows: Callable[[Fields, int], tuple[int | None, ...]] = no_windows
    """The sliding window of each layer: a function of ``baton.models.sliding_windows``."""


FAMILIES: Mapping[str, ModelFamily] = MappingProxyType(
    {
        "LlamaForCausalLM": ModelFamily(mlp_bias="mlp_bias"),
        "MistralForCausalLM": ModelFamily(
            qkv_bias=False, o_bias=False, default_kv_heads=8, windows=one_window
        ),
        "Qwen2ForCausalLM": ModelFamily(qkv_bias=True, o_bias=False, windows=windows_by_layer_type),
        "Qwen3ForCausalLM": ModelFamily(
            model="baton.models.qwen3:Qwen3ForCausalLM",
            default_head_dim=128,
            windows=windows_by_layer_type,
        ),
    }
)
"""The architectures Baton serves."""
