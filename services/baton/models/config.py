"""What a model's config.json says, read strictly. Imports no torch: the router uses it too.

Every refusal is a ``ModelError`` of one line: the file, the field, the value found and what is allowed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal, get_args

from baton.errors import ModelError

DType = Literal["float32", "bfloat16", "float16"]
RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]
DTYPES: tuple[DType, ...] = get_args(DType)
ROPE_KINDS: tuple[RopeKind, ...] = get_args(RopeKind)


@dataclass(frozen=True, slots=True)
class Family:
    """How one architecture departs from Llama in its config.json."""

    qkv_bias: bool | None = None
    """Biases on the q, k and v projections; None: as ``attention_bias`` says."""
    o_bias: bool | None = None
    """Bias on the output projection; None: as ``attention_bias`` says."""
    default_head_dim: int | None = None
    """What a missing ``head_dim`` means; None: hidden_size / num_attention_heads."""
    default_kv_heads: int | None = None
    """What a missing ``num_key_value_heads`` means; None: as many as there are heads."""
    window: Literal["none", "every_layer", "layer_types"] = "none"


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "LlamaForCausalLM": Family(),
        "MistralForCausalLM": Family(qkv_bias=False, o_bias=False, default_kv_heads=8, window="every_layer"),
        "Qwen2ForCausalLM": Family(qkv_bias=True, o_bias=False, window="layer_types"),
        "Qwen3ForCausalLM": Family(default_head_dim=128, window="layer_types"),
    }
)
"""The architectures Baton knows. Their modules are in ``baton.models.registry``."""


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
class ModelConfig:
    """A decoder-only model, as its modules and the engine need to know it."""

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
    """Per layer: how many tokens a token sees, itself included; None: all of them."""
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: DType
    """The type the weights were saved in."""

    @property
    def longest_shared_prompt(self) -> int | None:
        """Longest prompt whose KV means the same in every request, so that others may use it; None: any."""
        return self.rope.original_max_positions if self.rope.kind == "dynamic" else None

    @property
    def max_model_len(self) -> int:
        """Most tokens (prompt and output together) that a sequence may have.

        Dynamic NTK and YaRN checkpoints state the length before stretching in ``max_position_embeddings``
        (YaRN ones sometimes the length after it). For linear scaling both habits exist and nothing in the
        file tells them apart, so the stated length is taken as the limit.
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
        """The same from JSON objects already read; ``where`` begins every error message."""
        fields = Fields(config, where)
        architecture = _architecture(fields)
        family = FAMILIES[architecture]
        heads = fields.integer("num_attention_heads")
        kv_heads = fields.integer("num_key_value_heads", family.default_kv_heads or heads)
        if heads % kv_heads:
            raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
        if fields.text("hidden_act", "silu") not in ("silu", "swish"):
            raise fields.error("hidden_act", "silu")
        attention_bias = fields.flag("attention_bias", False)
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
            windows=_windows(fields, family, num_layers),
            qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            o_bias=attention_bias if family.o_bias is None else family.o_bias,
            mlp_bias=architecture == "LlamaForCausalLM" and fields.flag("mlp_bias", False),
            tie_word_embeddings=fields.flag("tie_word_embeddings", False),
            eos_token_ids=_eos(fields, Fields(generation or {}, where)),
            bos_token_id=fields.integer("bos_token_id", minimum=0) if fields.has("bos_token_id") else None,
            dtype=_dtype(fields),
        )


class Fields:
    """Typed access to a JSON object. A field that is null counts as absent, as it does in transformers."""

    def __init__(self, values: Mapping[str, object], where: str, prefix: str = "") -> None:
        self._values = values
        self._where = where
        self._prefix = prefix

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def is_null(self, name: str) -> bool:
        return name in self._values and self._values[name] is None

    def get(self, name: str) -> object:
        return self._values.get(name)

    def error(self, name: str, allowed: str) -> ModelError:
        if not self.has(name):
            return ModelError(f"{self._where}: {self._prefix}{name} is missing; needed: {allowed}")
        found = json.dumps(self._values[name])
        return ModelError(f"{self._where}: {self._prefix}{name} is {found}; allowed: {allowed}")

    def integer(self, name: str, default: int | None = None, *, minimum: int = 1) -> int:
        value = self._values[name] if self.has(name) else default
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(name, f"a whole number of at least {minimum}")
        return value

    def number(self, name: str, default: float | None = None, *, minimum: float = 0.0) -> float:
        """A finite number above 0 and not under ``minimum``."""
        value = self._values[name] if self.has(name) else default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.error(name, "a number above 0")
        if value < minimum:
            raise self.error(name, f"a number of at least {minimum:g}")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        return self.number(name) if self.has(name) else None

    def flag(self, name: str, default: bool) -> bool:
        value = self._values[name] if self.has(name) else default
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._values[name] if self.has(name) else default
        if not isinstance(value, str):
            raise self.error(name, "a string")
        return value

    def object(self, name: str) -> Fields:
        value = self._values[name] if self.has(name) else {}
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return Fields(value, self._where, prefix=f"{self._prefix}{name}.")


def read_object(file: Path) -> Mapping[str, object]:
    """The JSON object in ``file``. ModelError if there is none."""
    try:
        value: object = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file}: holds no JSON object")
    return value


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


def _head_dim(fields: Fields, family: Family, heads: int) -> int:
    hidden = fields.integer("hidden_size")
    if not fields.has("head_dim") and family.default_head_dim is None and hidden % heads:
        raise fields.error("hidden_size", f"a multiple of num_attention_heads ({heads}) without a head_dim")
    head_dim = fields.integer("head_dim", family.default_head_dim or hidden // heads)
    if head_dim % 2:
        raise fields.error("head_dim", "an even number")
    return head_dim


def _windows(fields: Fields, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """Sliding window of each layer, by the rules (and defaults) of transformers."""
    match family.window:
        case "none":
            return (None,) * num_layers
        case "every_layer":
            # Mistral: a missing field means 4096, an explicit null means none.
            none = fields.is_null("sliding_window")
            return (None if none else fields.integer("sliding_window", 4096),) * num_layers
        case "layer_types":
            window = None
            if fields.flag("use_sliding_window", False):
                window = fields.integer("sliding_window", 4096)
            return _windows_by_layer(fields, window, num_layers)


def _windows_by_layer(fields: Fields, window: int | None, num_layers: int) -> tuple[int | None, ...]:
    if not fields.has("layer_types"):
        full_layers = fields.integer("max_window_layers", 28, minimum=0)
        return tuple(None if layer < full_layers else window for layer in range(num_layers))
    kinds = fields.get("layer_types")
    allowed = {"full_attention", "sliding_attention"}
    if not isinstance(kinds, list) or len(kinds) != num_layers or not allowed.issuperset(kinds):
        raise fields.error("layer_types", f"{num_layers} times full_attention or sliding_attention")
    if "sliding_attention" in kinds and window is None:
        raise fields.error("layer_types", "full_attention only, unless use_sliding_window is true")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope(fields: Fields) -> RopeConfig:
    """``rope_parameters`` as transformers 5 writes it, or ``rope_theta`` and ``rope_scaling`` from before."""
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
