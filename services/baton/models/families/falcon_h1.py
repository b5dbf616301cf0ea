"""Falcon-H1 (https://arxiv.org/abs/2507.22448): attention and Mamba-2 side by side in every layer, and
factors almost everywhere."""

from __future__ import annotations

from dataclasses import replace

from baton.models.config import ModelConfig
from baton.models.families.bamba import NAMES
from baton.models.families.llama import llama_like
from baton.models.json_fields import Fields
from baton.models.mamba_fields import read_mamba
from baton.models.mixer_config import MambaConfig
from baton_kernels.activation_kind import Activation


def read(fields: Fields) -> ModelConfig:
    """Read Falcon-H1's config. ModelError if it is not one that Baton serves."""
    biased = fields.flag("attention_bias", False)
    config = llama_like(
        fields,
        qkv_bias=biased,
        o_bias=biased,
        mlp_bias=fields.flag("mlp_bias", False),
        default_kv_heads=8,
        default_eps=1e-5,
    )
    gate, down = _factors(fields, "mlp_multipliers", 2)
    taken = fields.number("attention_in_multiplier", 1.0)
    if biased and taken != 1:
        raise fields.error("attention_in_multiplier", "1 with attention_bias")
    # Queries, keys and values are linear in what attention takes.
    scores = config.head_dim**-0.5 * fields.number("key_multiplier", 1.0) * taken**2
    added = taken * fields.number("attention_out_multiplier", 1.0)
    return replace(
        config,
        attention_scale=scores,
        activation=config.activation if gate == 1 else Activation("scaled_silu", gate),
        mlp_factor=down,
        mixers=(("mamba", "attention"),) * config.num_layers,
        mixer_factors=(("mamba", fields.number("ssm_out_multiplier", 1.0)), ("attention", added)),
        mamba=_mamba(fields),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        logits_scale=fields.number("lm_head_multiplier", 1.0),
        names=NAMES,
    )


def _mamba(fields: Fields) -> MambaConfig:
    inner = None if fields.is_null("mamba_d_ssm") else fields.integer("mamba_d_ssm", 1024)
    layer = read_mamba(fields, default_inner=inner, out_bias=fields.flag("projectors_bias", False))
    taken = fields.number("ssm_in_multiplier", 1.0)
    if layer.in_bias and taken != 1:
        raise fields.error("ssm_in_multiplier", "1 with mamba_proj_bias")
    z, x, b, c, dt = (taken * factor for factor in _factors(fields, "ssm_multipliers", 5))
    return replace(
        layer,
        norm=fields.flag("mamba_rms_norm", False),
        gate_first=not fields.flag("mamba_norm_before_gate", True),
        factors=(z, x, b, c, dt),
    )


def _factors(fields: Fields, name: str, count: int) -> list[float]:
    """A list of so many factors; a missing one is of ones."""
    found = fields.get(name) if fields.has(name) else [1.0] * count
    numbers = (
        [float(n) for n in found if type(n) in (int, float) and n > 0] if isinstance(found, list) else []
    )
    if len(numbers) != count or numbers != found:
        raise fields.error(name, f"{count} numbers above 0")
    return numbers
