"""The Mamba-2 layers of a config.json. Imports no torch: the router uses it too.

The functions follow the rules and defaults of transformers, and raise ModelError.
"""

from __future__ import annotations

from math import inf

from baton.models.json_fields import Fields
from baton.models.mixer_config import MambaConfig, MixerKind, mamba_units

LAYER_KINDS: dict[str, tuple[MixerKind, ...]] = {
    "mamba": ("mamba",),
    "linear_attention": ("mamba",),
    "attention": ("attention",),
    "full_attention": ("attention",),
}
"""What layers mix tokens by, by the names in ``layer_types``, old ones and new ones."""
INFINITE = {"__float__": "Infinity"}
"""A number without end, as transformers 5 writes it."""


def read_mamba(
    fields: Fields, *, default_inner: int | None = None, out_bias: bool | None = None
) -> MambaConfig:
    """Read the fields that begin with ``mamba_``, as Bamba, Granite 4 and Falcon-H1 have them.

    ``default_inner``: the numbers of all heads; None: ``mamba_expand`` times the hidden size. ``out_bias``:
    whether the last projection has a bias; None: if the first one has."""
    heads = fields.integer("mamba_n_heads", 128)
    inner = default_inner or fields.integer("mamba_expand", 2) * fields.integer("hidden_size")
    if inner % heads:
        raise fields.error("mamba_n_heads", f"a divisor of the layer's inner size ({inner})")
    if fields.has("mamba_d_head"):
        fields.only("mamba_d_head", "auto", inner // heads)
    groups = fields.integer("mamba_n_groups", 1)
    if heads % groups:
        raise fields.error("mamba_n_groups", f"a divisor of mamba_n_heads ({heads})")
    fields.only("hidden_act", "silu", "swish")
    bias = fields.flag("mamba_proj_bias", False)
    return MambaConfig(
        heads=heads,
        head_dim=inner // heads,
        groups=groups,
        state_dim=fields.integer("mamba_d_state", 256),
        conv_kernel=fields.integer("mamba_d_conv", 4, minimum=2),
        units=mamba_units(heads, groups),
        conv_bias=fields.flag("mamba_conv_bias", True),
        in_bias=bias,
        out_bias=bias if out_bias is None else out_bias,
        dt_limits=time_step_limits(fields),
    )


def time_step_limits(fields: Fields) -> tuple[float, float]:
    """The least and the largest time step by ``time_step_limit``; without it, there is no limit."""
    found = fields.get("time_step_limit") if fields.has("time_step_limit") else [0.0, inf]
    limits = [inf if n == INFINITE else n for n in found] if isinstance(found, list | tuple) else []
    if [type(n) in (int, float) for n in limits] != [True, True] or not 0 <= limits[0] <= limits[1]:
        raise fields.error("time_step_limit", "two numbers of at least 0, the larger one last")
    return float(limits[0]), float(limits[1])


def layer_mixers(fields: Fields, name: str, num_layers: int) -> tuple[tuple[MixerKind, ...], ...]:
    """The mixers of each layer by the field ``name``; without it, Mamba in all."""
    kinds = fields.get(name) if fields.has(name) else ["mamba"] * num_layers
    if not isinstance(kinds, list) or len(kinds) != num_layers or not {*LAYER_KINDS}.issuperset(kinds):
        raise fields.error(name, f"{num_layers} times one of " + ", ".join(LAYER_KINDS))
    return tuple(LAYER_KINDS[kind] for kind in kinds)
