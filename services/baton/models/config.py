"""A model's config.json, read strictly. Imports no torch: the router uses it too.

Every refusal is a ``ModelError`` of one line: the file, the field, the value found and what is allowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from baton.models.json_fields import Fields, read_object
from baton.models.quantization.experts_format import SEPARATE, ExpertNames
from baton.models.registry import FAMILIES, ModelFamily
from baton.process.options import ModelError
from baton_kernels.activation_kind import SILU, Activation
from baton_kernels.routing_rule import Routing

DType = Literal["float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "dummy"]
"""dummy: random weights, to measure without a download."""
RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]
DTYPES: tuple[DType, ...] = get_args(DType)
ROPE_KINDS: tuple[RopeKind, ...] = get_args(RopeKind)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding. Fields that a kind does not use keep their defaults."""

    kind: RopeKind = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_positions: int = 0
    """Positions the model was trained on before its context was stretched; 0 where the kind needs none."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The mixture of experts of a layer. Names of tensors are relative to the MLP, and whole but for
    "router"."""

    num_experts: int
    inner: int
    """Rows of each expert's gate and up projections (moe_intermediate_size)."""
    routing: Routing
    names: ExpertNames = SEPARATE
    activation: Activation = SILU
    bias: bool = False
    """Whether the experts' projections have biases."""
    router: str = "gate"
    """The module of the router's weight [num_experts, hidden], and bias."""
    router_bias: bool = False
    router_float32: bool = False
    """Whether the router computes in float32, whatever the model's type."""
    correction_bias: str = ""
    """The tensor that is added to the scores for the choice alone, [num_experts] float32; "": none."""
    correction_rows: int = 0
    """1: the checkpoint's correction bias is [1, num_experts]."""
    shared: str = ""
    """The module of an MLP that every token goes through; "": none."""
    shared_inner: int = 0
    shared_gate: str = ""
    """The weight [1, hidden] whose product's sigmoid scales the shared MLP; "": none."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The sizes and settings of a decoder-only model that its modules and the engine use."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rope: RopeConfig
    rms_norm_eps: float
    windows: tuple[int | None, ...]
    """The number of tokens that a token sees in each layer, itself included; None: all tokens."""
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: DType
    """The type the weights were saved in."""
    experts: ExpertsConfig | None = None
    """The experts that layers have instead of one MLP; None: no layer has any."""

    @property
    def longest_shared_prompt(self) -> int | None:
        """The longest prompt whose KV means the same in every request, so that other requests may use it;
        None: any."""
        return self.rope.original_max_positions if self.rope.kind == "dynamic" else None

    @property
    def max_model_len(self) -> int:
        """Most tokens (prompt and output together) that a sequence may have.

        Dynamic NTK and YaRN checkpoints state the length before stretching in ``max_position_embeddings``
        (some YaRN ones the length after it). For linear scaling both habits exist and nothing in the file
        tells them apart, so the stated length is taken as the limit.
        """
        match self.rope.kind:
            case "dynamic":
                return int(self.max_position_embeddings * self.rope.factor)
            case "yarn":
                stretched = int(self.rope.original_max_positions * self.rope.factor)
                return max(self.max_position_embeddings, stretched)
            case _:
                return self.max_position_embeddings

    @classmethod
    def from_dir(cls, path: Path) -> ModelConfig:
        """Read ``config.json`` and, where there is one, ``generation_config.json``.

        Raises ModelError when the directory or its config.json is missing or describes a model that Baton
        does not serve.
        """
        if not path.is_dir():
            raise ModelError(f"{path}: no such directory")
        config_file = path / "config.json"
        if not config_file.is_file():
            raise ModelError(f"{path}: no config.json in this directory")
        generation_file = path / "generation_config.json"
        generation = read_object(generation_file) if generation_file.is_file() else {}
        return cls.from_dict(read_object(config_file), generation, where=str(config_file))

    @classmethod
    def from_dict(
        cls,
        config: Mapping[str, object],
        generation: Mapping[str, object] | None = None,
        *,
        where: str = "config.json",
    ) -> ModelConfig:
        """Read a model's config from JSON objects already read; ``where`` begins every error message."""
        fields = Fields(config, where)
        architecture = _architecture(fields)
        family = FAMILIES[architecture]
        heads = fields.integer("num_attention_heads")
        kv_heads = fields.integer("num_key_value_heads", family.default_kv_heads or heads)
        if heads % kv_heads:
            raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
        if fields.text("hidden_act", "silu") not in ("silu", "swish"):
            raise fields.error("hidden_act", "silu")
        fields.flag("attention_bias", False)  # refused if it is no flag, whatever the family makes of it
        num_layers = fields.integer("num_hidden_layers")
        return cls(
            architecture=architecture,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=fields.integer("hidden_size"),
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=_head_dim(fields, family, heads),
            max_position_embeddings=fields.integer("max_position_embeddings"),
            rope=_rope(fields),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            windows=family.windows(fields, num_layers),
            qkv_bias=_bias(fields, family.qkv_bias),
            o_bias=_bias(fields, family.o_bias),
            mlp_bias=_bias(fields, family.mlp_bias),
            tie_word_embeddings=fields.flag("tie_word_embeddings", False),
            eos_token_ids=_eos(fields, Fields(generation or {}, where)),
            bos_token_id=fields.integer("bos_token_id", minimum=0) if fields.has("bos_token_id") else None,
            dtype=_dtype(fields),
        )


def _architecture(fields: Fields) -> str:
    if fields.has("auto_map"):
        raise fields.error("auto_map", "nothing (Baton runs no code that comes with a model)")
    if fields.has("quantization_config"):
        raise fields.error("quantization_config", "nothing (quantized weights are not supported)")
    known = "one of " + ", ".join(FAMILIES)
    names = fields.get("architectures")
    if not isinstance(names, list) or not names or names[0] not in FAMILIES:
        raise fields.error("architectures", known)
    return str(names[0])


def _bias(fields: Fields, rule: bool | str) -> bool:
    return fields.flag(rule, False) if isinstance(rule, str) else rule


def _head_dim(fields: Fields, family: ModelFamily, heads: int) -> int:
    hidden = fields.integer("hidden_size")
    if not fields.has("head_dim") and family.default_head_dim is None and hidden % heads:
        raise fields.error("hidden_size", f"a multiple of num_attention_heads ({heads}) without a head_dim")
    head_dim = fields.integer("head_dim", family.default_head_dim or hidden // heads)
    if head_dim % 2:
        raise fields.error("head_dim", "an even number")
    return head_dim


def _rope(fields: Fields) -> RopeConfig:
    """The rotary embedding, from ``rope_parameters`` as transformers 5 writes it, or the older ``rope_theta``
    and ``rope_scaling``."""
    rope = fields.object("rope_scaling" if fields.has("rope_scaling") else "rope_parameters")
    theta_at = rope if rope.has("rope_theta") else fields
    theta = theta_at.number("rope_theta", 10_000.0)
    name = "rope_type" if rope.has("rope_type") else "type"
    kind = next((kind for kind in ROPE_KINDS if kind == rope.text(name, "default")), None)
    if kind is None:
        raise rope.error(name, "one of " + ", ".join(ROPE_KINDS))
    for holder in (rope, fields):
        if holder.number("partial_rotary_factor", 1.0) != 1.0:
            raise holder.error("partial_rotary_factor", "1 (rotating a part of each head is not supported)")
    trained = fields.integer("max_position_embeddings")
    match kind:
        case "default":
            return RopeConfig(theta=theta)
        case "linear":
            return RopeConfig(kind, theta, rope.number("factor", minimum=1.0))
        case "dynamic":
            return RopeConfig(kind, theta, rope.number("factor", minimum=1.0), trained)
        case "llama3":
            return _llama3(fields, rope, theta)
        case "yarn":
            return _yarn(fields, rope, theta)


def _original_positions(fields: Fields, rope: Fields) -> int:
    holder = fields if fields.has("original_max_position_embeddings") else rope
    return holder.integer("original_max_position_embeddings", fields.integer("max_position_embeddings"))


def _llama3(fields: Fields, rope: Fields, theta: float) -> RopeConfig:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise rope.error("high_freq_factor", f"more than low_freq_factor ({low:g})")
    return RopeConfig(
        kind="llama3",
        theta=theta,
        factor=rope.number("factor", minimum=1.0),
        original_max_positions=_original_positions(fields, rope),
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(fields: Fields, rope: Fields, theta: float) -> RopeConfig:
    original = _original_positions(fields, rope)
    stretch = fields.integer("max_position_embeddings") / original
    return RopeConfig(
        kind="yarn",
        theta=theta,
        factor=rope.number("factor", stretch, minimum=1.0),
        original_max_positions=original,
        attention_factor=rope.optional_number("attention_factor"),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.flag("truncate", True),
    )


def _eos(fields: Fields, generation: Fields) -> tuple[int, ...]:
    """The ids that end an answer: generation_config.json's where it names any, else config.json's."""
    holder = generation if generation.has("eos_token_id") else fields
    value = holder.get("eos_token_id")
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise holder.error("eos_token_id", "a token id or a list of them")
    return tuple(sorted(set(ids)))


def _dtype(fields: Fields) -> DType:
    name = "dtype" if fields.has("dtype") else "torch_dtype"
    written = fields.text(name, "float32").removeprefix("torch.")
    for dtype in DTYPES:
        if dtype == written:
            return dtype
    raise fields.error(name, "one of " + ", ".join(DTYPES))
