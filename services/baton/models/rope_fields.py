"""The rotary embedding of a config.json. Imports no torch: the router uses it too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from baton.models.config import ROPE_KINDS, RopeConfig
from baton.models.json_fields import LARGEST_NUMBER, Fields
from baton.models.layer_windows import FULL, SLIDING


def read_rope(
    fields: Fields,
    head_dim: int,
    *,
    partial: float = 1.0,
    interleaved: bool = False,
    parameters: Fields | None = None,
    theta: float = 10_000.0,
) -> RopeConfig:
    """Read the rotary embedding from ``rope_parameters`` as transformers 5 writes it, or the older
    ``rope_theta`` and ``rope_scaling``.

    ``partial``: the share of each head that a config without ``partial_rotary_factor`` rotates.
    ``parameters``: the object to read instead (a config with several kinds of layers has several). ``theta``:
    the base that a config without one has. ModelError if a field is missing or out of range.
    """
    rope = parameters or fields.object("rope_scaling" if fields.has("rope_scaling") else "rope_parameters")
    name = "rope_type" if rope.has("rope_type") else "type"
    written = rope.text(name, "default")
    written = "longrope" if written == "su" else written  # the name that Phi-3's first configs have
    kind = next((kind for kind in ROPE_KINDS if kind == written), None)
    if kind is None:
        raise rope.error(name, "one of " + ", ".join(ROPE_KINDS))
    base = (rope if rope.has("rope_theta") else fields).number("rope_theta", theta)
    share = _partial(fields, rope, head_dim, partial)
    common = RopeConfig(kind, base, partial=share, interleaved=interleaved)
    match kind:
        case "default":
            return common
        case "linear":
            return replace(common, factor=rope.number("factor", minimum=1.0))
        case "dynamic":
            trained = fields.integer("max_position_embeddings")
            return replace(common, factor=rope.number("factor", minimum=1.0), original_max_positions=trained)
        case "llama3":
            return _llama3(fields, rope, common)
        case "yarn":
            return _yarn(fields, rope, common)
        case "longrope":
            return _longrope(fields, rope, common, head_dim)


def read_ropes_of_kinds(
    fields: Fields, head_dim: int, kinds: Sequence[str], *, theta: float, local_theta: float
) -> tuple[RopeConfig, ...]:
    """Read the rotary embedding of each layer of a model that has one for each of ``kinds`` (names of
    ``layer_windows``).

    ``rope_parameters`` has an object for each kind. The older ``rope_theta`` and ``rope_scaling`` are of the
    layers that see all tokens. ``theta`` and ``local_theta``: the bases of these and of the layers with a
    window where they have none. ModelError as from ``read_rope``.
    """
    parameters = fields.object("rope_parameters")
    if any(parameters.has(name) for name in ("rope_type", "type", "rope_theta")):
        raise fields.error("rope_parameters", f"an object for each kind of layer, {FULL} and {SLIDING}")
    whole = fields.object("rope_scaling") if fields.has("rope_scaling") else parameters.object(FULL)
    window = parameters.object(SLIDING).with_defaults({"rope_theta": local_theta})
    ropes = {
        FULL: read_rope(fields, head_dim, parameters=whole, theta=theta),
        SLIDING: read_rope(fields, head_dim, parameters=window),
    }
    return tuple(ropes[kind] for kind in kinds)


def _partial(fields: Fields, rope: Fields, head_dim: int, default: float) -> float:
    holder = rope if rope.has("partial_rotary_factor") else fields
    share = holder.number("partial_rotary_factor", default)
    rotated = int(head_dim * min(share, 1.0))
    if share > 1 or rotated < 2 or rotated % 2:
        raise holder.error(
            "partial_rotary_factor", f"at most 1, and an even number of a head's {head_dim} dimensions"
        )
    return share


def _original_positions(fields: Fields, rope: Fields) -> int:
    holder = fields if fields.has("original_max_position_embeddings") else rope
    return holder.integer("original_max_position_embeddings", fields.integer("max_position_embeddings"))


def _llama3(fields: Fields, rope: Fields, common: RopeConfig) -> RopeConfig:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high < low:
        raise rope.error("high_freq_factor", f"at least low_freq_factor ({low:g})")
    return replace(
        common,
        factor=rope.number("factor", minimum=1.0),
        original_max_positions=_original_positions(fields, rope),
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(fields: Fields, rope: Fields, common: RopeConfig) -> RopeConfig:
    original = _original_positions(fields, rope)
    stretch = fields.integer("max_position_embeddings") / original
    return replace(
        common,
        factor=rope.number("factor", stretch, minimum=1.0),
        original_max_positions=original,
        attention_factor=rope.optional_number("attention_factor"),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        mscale=rope.number_if_any("mscale"),
        mscale_all_dim=rope.number_if_any("mscale_all_dim"),
        truncate=rope.flag("truncate", True),
    )


def _longrope(fields: Fields, rope: Fields, common: RopeConfig, head_dim: int) -> RopeConfig:
    original = _original_positions(fields, rope)
    stretch = fields.integer("max_position_embeddings") / original
    count = common.rotated(head_dim) // 2
    phi_moe = rope.has("short_mscale")
    return replace(
        common,
        factor=rope.number("factor", stretch, minimum=1.0),
        original_max_positions=original,
        attention_factor=rope.optional_number("short_mscale" if phi_moe else "attention_factor"),
        long_attention_factor=rope.optional_number("long_mscale" if phi_moe else "attention_factor"),
        short_factors=_factors(rope, "short_factor", count),
        long_factors=_factors(rope, "long_factor", count),
    )


def _factors(rope: Fields, name: str, count: int) -> tuple[float, ...]:
    found = rope.get(name)
    if not isinstance(found, list) or len(found) != count:
        raise rope.error(name, f"{count} numbers above 0, one for each pair of rotated dimensions")
    numbers = [
        float(n)
        for n in found
        if isinstance(n, int | float) and not isinstance(n, bool) and 0 < n <= LARGEST_NUMBER
    ]
    if len(numbers) < count:
        raise rope.error(name, f"{count} numbers above 0, one for each pair of rotated dimensions")
    return tuple(numbers)
