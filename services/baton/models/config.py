"""A model's config.json, read strictly. Imports no torch: the router uses it too.

A family (``baton.models.families``) reads its own fields into a ``ModelConfig``, which describes the model as
a whole: one decoder (``baton.models.decoder``) is built from that, whatever the family. Every refusal is a
``ModelError`` of one line: the file, the field, the value found and what is allowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Literal, get_args

from baton.models.json_fields import LARGEST, Fields, read_object
from baton.models.mixer_config import ConvConfig, DeltaConfig, LatentConfig, MambaConfig, MixerKind
from baton.models.quantization.experts_format import SEPARATE, ExpertNames
from baton.models.quantization.registry import METHODS
from baton.models.quantization.weight_spec import QuantizedCheckpoint
from baton.models.registry import FAMILIES, UNSERVED
from baton.parallel.shard import StateSplit
from baton.process.options import ModelError
from baton_kernels.activation_kind import SILU, Activation
from baton_kernels.kv_layout import LayerKV, TokenKV
from baton_kernels.routing_rule import Routing
from baton_kernels.window import Window

QUANTIZATION_FILE = "hf_quant_config.json"
"""The file in which ModelOpt says of quantized weights what config.json does not."""
DType = Literal["float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "dummy"]
KVCacheDtype = Literal["auto", "fp8", "fp8-dynamic"]
"""What a KV cache holds: numbers of the model's type, or FP8."""
"""dummy: random weights, to measure without a download."""
RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
HeadNormKind = Literal["heads", "plain", "rotated", "whole"]
"""The norms of queries and keys. heads: each head, by a weight for all heads, before it is rotated.
plain: each head, without a weight. rotated: each head, by a weight, after it is rotated. whole: all heads
together, before they are rotated."""
NormPlaces = Literal["before", "after", "around", "beside"]
"""The places of norms. before: in front of attention and MLP (Llama). after: behind each, on its way to the
residual stream (OLMo 2). around: in front and behind (Gemma 2). beside: one norm in front of both, which read
the same and are added together (Cohere 2)."""
LONGEST_BY_LENGTH = 2**20
"""The most tokens of a sequence where each length has frequencies of its own, which are kept."""
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
    short_factors: tuple[float, ...] = ()
    """longrope: what divides each frequency of a sequence within the trained length."""
    long_factors: tuple[float, ...] = ()
    """longrope: what divides each frequency of a longer sequence."""
    long_attention_factor: float | None = None
    """longrope: ``attention_factor`` of a longer sequence."""
    partial: float = 1.0
    """The share of each head's dimensions that is rotated, the first ones."""
    interleaved: bool = False
    """Whether neighbours (2i, 2i + 1) are rotated together, not i with the dimension half the rotated ones
    on."""

    def rotated(self, head_dim: int) -> int:
        """The number of dimensions of a head that are rotated."""
        return int(head_dim * self.partial)

    @property
    def by_length(self) -> bool:
        """Whether angles depend on the length of the sequence, not on the position alone."""
        return self.kind in ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class QueryScale:
    """A factor of the queries that grows with their position p: 1 + beta * ln(1 + floor((p + shift) /
    period))."""

    beta: float
    period: float
    shift: int = 0
    unrotated_only: bool = False
    """Whether it is for the layers without rotary positions alone (Llama 4)."""


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The mixture of experts of a layer. Names are relative to the MLP."""

    num_experts: int
    inner: int
    """Rows of each expert's gate and up projections (moe_intermediate_size)."""
    routing: Routing
    names: ExpertNames = SEPARATE
    other_names: ExpertNames | None = None
    """The names that checkpoints may have instead: those of the tensors of all experts."""
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
    """The module whose weight [1, hidden] gives the logit of the shared MLP's factor; "": none."""
    gated: bool = True
    """Whether experts have gates."""
    latent: int = 0
    """Numbers of the latent that experts take and yield instead of hidden states; 0: there is none."""
    latent_in: str = ""
    """The module that makes a token's latent."""
    latent_out: str = ""
    """The module that makes hidden states of what experts yield."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The sizes and settings of a decoder-only model that its modules and the engine use."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Inner rows of the layers' MLPs that are not experts."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    ropes: tuple[RopeConfig | None, ...]
    """The rotary embedding of each layer; None: positions are not rotated."""
    norm_eps: float
    windows: tuple[Window | None, ...]
    """The tokens that a token sees in each layer; None: all tokens."""
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: DType = "float32"
    """The type the weights were saved in."""
    norm_offset: float = 0.0
    """A number added to the weights of norms (Gemma: 1)."""
    layer_norm: bool = False
    """Whether norms subtract the mean first."""
    norm_bias: bool = False
    norm_places: NormPlaces = "before"
    head_norm: HeadNormKind | None = None
    attention_scale: float | None = None
    """The factor of the scores; None: head_dim ** -0.5."""
    attention_softcap: float | None = None
    sinks: bool = False
    """Whether each head has a logit of its own in the softmax's denominator (gpt-oss)."""
    query_scale: QueryScale | None = None
    attention_gate: bool = False
    """Whether attention's output is multiplied by the sigmoid of a second part of each head's query
    projection."""
    activation: Activation = SILU
    gated_mlp: bool = True
    experts: ExpertsConfig | None = None
    """The experts that layers have instead of one MLP; None: no layer has any."""
    expert_layers: tuple[bool, ...] = ()
    """Whether each layer has experts; empty: none has."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """A factor of what attention and MLP add to the residual stream."""
    logits_scale: float = 1.0
    logits_softcap: float | None = None
    head_bias: bool = False
    """Whether the output head has a bias."""
    names: tuple[tuple[str, str], ...] = ()
    """The parts of tensors' names that the checkpoint spells differently: Baton's, the checkpoint's. The
    first one that a name has is replaced."""
    fused_qkv: bool = False
    """Whether the checkpoint has the q, k and v projections as one tensor, ``qkv_proj``."""
    fused_gate_up: bool = False
    """Whether the checkpoint has the MLP's gate and up projections as one tensor, ``gate_up_proj``."""
    mixers: tuple[tuple[MixerKind, ...], ...] = ()
    """What each layer mixes tokens by; several at once are added together, and a layer may have none. Empty:
    every layer has attention."""
    mlps: tuple[bool, ...] = ()
    """Whether each layer has an MLP or experts; empty: every one has."""
    latent: LatentConfig | None = None
    delta: DeltaConfig | None = None
    mamba: MambaConfig | None = None
    conv: ConvConfig | None = None
    mixer_factors: tuple[tuple[MixerKind, float], ...] = ()
    """Factors of what some kinds of mixers add; those of the others are 1."""
    mlp_factor: float = 1.0
    """The factor of what MLPs add."""
    ignored: tuple[str, ...] = ()
    """Parts of the names of tensors that are of no use here (an image encoder's, a draft layer's)."""
    quantization: QuantizedCheckpoint | None = None
    """The quantized weights of the checkpoint; None: all are plain."""

    @property
    def rope(self) -> RopeConfig:
        """The rotary embedding that the model's reach follows from: that of the first layer that sees all
        tokens, or of the first that has one."""
        rotated = [(rope, window) for rope, window in zip(self.ropes, self.windows, strict=True) if rope]
        whole = [rope for rope, window in rotated if window is None]
        return (whole or [rope for rope, _ in rotated] or [RopeConfig()])[0]

    def mixers_of(self, layer: int) -> tuple[MixerKind, ...]:
        """What the layer of this index mixes tokens by."""
        return self.mixers[layer] if self.mixers else ("attention",)

    def has_mlp(self, layer: int) -> bool:
        """Whether the layer of this index has an MLP or experts."""
        return not self.mlps or self.mlps[layer]

    def kept_by(self, mixer: MixerKind, layer: int, ranks: int = 1) -> LayerKV:
        """What a mixer of this layer keeps on one of ``ranks`` tensor-parallel ranks."""
        match mixer:
            case "attention":
                heads = max(1, self.num_kv_heads // ranks)
                return TokenKV(heads, 2, self.head_dim, self.windows[layer])
            case "latent":
                assert self.latent is not None
                return self.latent.kept()
            case "delta":
                assert self.delta is not None
                return self.delta.kept(ranks)
            case "mamba":
                assert self.mamba is not None
                return self.mamba.kept(ranks)
            case "conv":
                assert self.conv is not None
                return self.conv.kept(ranks)

    def kept(self, ranks: int = 1) -> tuple[tuple[LayerKV, ...], ...]:
        """What each layer keeps on one of ``ranks`` tensor-parallel ranks."""
        return tuple(
            tuple(self.kept_by(mixer, layer, ranks) for mixer in self.mixers_of(layer))
            for layer in range(self.num_layers)
        )

    @property
    def state_splits(self) -> tuple[StateSplit, ...]:
        """The mixers with a state, as tensor parallelism may split them."""
        kinds: tuple[StateSplit | None, ...] = (self.delta, self.mamba, self.conv)
        return tuple(kind for kind in kinds if kind is not None)

    def has_experts(self, layer: int) -> bool:
        """Whether the layer of this index has experts instead of one MLP."""
        return self.experts is not None and self.expert_layers[layer]

    def head_norm_of(self, layer: int) -> HeadNormKind | None:
        """The norm of the queries and keys of one layer. The plain norm is of rotated layers alone (Llama
        4)."""
        return None if self.head_norm == "plain" and self.ropes[layer] is None else self.head_norm

    @property
    def inner_sizes(self) -> tuple[int, ...]:
        """The inner rows of each kind of MLP that the model has; tensor parallelism splits them."""
        sizes = [] if self.expert_layers and all(self.expert_layers) else [self.intermediate_size]
        if self.experts is not None:
            sizes += [size for size in (self.experts.inner, self.experts.shared_inner) if size]
        return tuple(sizes)

    @property
    def scale(self) -> float:
        """The factor of the attention's scores."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def longest_shared_prompt(self) -> int | None:
        """The longest prompt whose KV means the same in every request, so that other requests may use it;
        None: any."""
        return self.rope.original_max_positions if self.rope.by_length else None

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
        generation_file, beside = path / "generation_config.json", path / QUANTIZATION_FILE
        generation = read_object(generation_file) if generation_file.is_file() else {}
        described = cls.from_dict(read_object(config_file), generation, where=str(config_file))
        if described.quantization is None and beside.is_file():
            return replace(described, quantization=_quantization_beside(beside))
        return described

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
        with fields.refusing():
            return cls._read(fields, Fields(generation or {}, where))

    @classmethod
    def _read(cls, fields: Fields, generation: Fields) -> ModelConfig:
        architecture = _architecture(fields)
        family = FAMILIES[architecture]
        text = fields.object("text_config") if family.text_config else fields
        described: ModelConfig = resolve_name(family.read)(text)
        most = LONGEST_BY_LENGTH if described.rope.kind == "dynamic" else LARGEST
        if described.max_model_len > most:
            allowed = f"a length that, times the factor of the rotation, is at most {most}"
            raise text.error("max_position_embeddings", allowed)
        holder = fields if fields.has("bos_token_id") else text
        return replace(
            described,
            architecture=architecture,
            tie_word_embeddings=fields.flag("tie_word_embeddings", described.tie_word_embeddings),
            eos_token_ids=_eos(generation, fields, text),
            bos_token_id=holder.integer("bos_token_id", minimum=0) if holder.has("bos_token_id") else None,
            dtype=_dtype(text, fields),
            ignored=(*described.ignored, *family.ignored),
            quantization=_quantization(fields, text),
        )


def _architecture(fields: Fields) -> str:
    names = fields.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or (name not in UNSERVED and name not in FAMILIES):
        if fields.has("auto_map"):
            raise fields.error("auto_map", "nothing (Baton runs no code that comes with a model)")
        raise fields.error("architectures", "one of " + ", ".join(FAMILIES))
    if name in UNSERVED:
        raise fields.refusal("architectures", UNSERVED[name])
    return name


def _quantization(*holders: Fields) -> QuantizedCheckpoint | None:
    """What the first object that names it says of quantized weights; None: they are plain."""
    for holder in holders:
        if holder.has("quantization_config"):
            fields = holder.object("quantization_config")
            method = fields.text("quant_method")
            if method not in METHODS:
                raise fields.error("quant_method", "one of " + ", ".join(METHODS))
            described: QuantizedCheckpoint = resolve_name(METHODS[method])(fields)
            return described
    return None


def _quantization_beside(file: Path) -> QuantizedCheckpoint:
    """What a file beside config.json says of quantized weights, which names its producer as the method."""
    fields = Fields(read_object(file), str(file))
    with fields.refusing():
        producer = fields.object("producer")
        if producer.get("name") != "modelopt":
            raise producer.error("name", '"modelopt"')
        described: QuantizedCheckpoint = resolve_name(METHODS["modelopt"])(fields)
        return described


def _eos(*holders: Fields) -> tuple[int, ...]:
    """The ids that end an answer: those of the first file or object that names any."""
    holder = next((holder for holder in holders if holder.has("eos_token_id")), holders[-1])
    value = holder.get("eos_token_id")
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(
        isinstance(token, int) and not isinstance(token, bool) and 0 <= token <= LARGEST for token in ids
    ):
        raise holder.error("eos_token_id", "a token id or a list of them")
    return tuple(sorted(set(ids)))


def _dtype(*holders: Fields) -> DType:
    """The type of the first object that names one, by its new or its old name."""
    for holder in holders:
        for name in ("dtype", "torch_dtype"):
            if not holder.has(name):
                continue
            written = holder.text(name).removeprefix("torch.")
            found = next((dtype for dtype in DTYPES if dtype == written), None)
            if found is None:
                raise holder.error(name, "one of " + ", ".join(DTYPES))
            return found
    return "float32"
