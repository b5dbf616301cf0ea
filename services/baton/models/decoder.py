"""The decoder of every family, built from the ``ModelConfig`` that the family reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, cast

import torch
from torch import Tensor, nn

from baton.models.attention import Attention
from baton.models.base import CausalLM
from baton.models.config import ModelConfig, RopeConfig
from baton.models.experts import Experts
from baton.models.latent_attention import LatentAttention
from baton.models.layers import MLP, Embedding, Increment, LayerNorm, Linear, RMSNorm, stream_norm
from baton.models.mixer import Mixer, PlacesItself
from baton.models.mixers import MIXER_NAMES, new_mixer
from baton.models.model_step import Narrow, States, Step, TablePlan
from baton.models.quantization.base import Index, LinearWeights, Multiplier, Place, QuantizationScheme
from baton.models.rope import RotaryEmbedding
from baton.parallel.collectives import Parallel
from baton_kernels.attention import AttentionPlan
from baton_kernels.cpu.attention import CpuPlan
from baton_kernels.cpu.latent import CpuLatentPlan
from baton_kernels.cpu.layers import LayerStack, LayerWeights, MixtureWeights
from baton_kernels.cpu.library import give_back_free_memory
from baton_kernels.cpu.linear import PackedWeight
from baton_kernels.kv_fp8 import UNSCALED, KVScales
from baton_kernels.kv_layout import KVLayout, KVPlace, LayerKV, TokenKV
from baton_kernels.kv_scaled import scaled_view
from baton_kernels.latent import LatentPlan
from baton_kernels.norm import Norm
from baton_kernels.paged import Chunk, PagedBatch, WantedRows
from baton_kernels.rows import add_norm

PackedMLP: TypeAlias = tuple[PackedWeight, PackedWeight] | MixtureWeights


class DecoderLayer(nn.Module):
    """What mixes tokens (attention, mostly), then an MLP or experts, with norms in front of them, behind them
    or both, each added to the residual stream. A layer may have one of both alone."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        rotation: int,
        dtype: torch.dtype,
        parallel: Parallel,
        scheme: QuantizationScheme,
    ) -> None:
        """``layer``: the layer's index in the whole model. ``rotation``: see ``Attention``."""
        super().__init__()
        places = config.norm_places
        before, behind = places != "after", places in ("after", "around")
        self.dtype = dtype
        self.factor = config.residual_scale
        self.is_parallel = places == "beside"
        """Whether attention and MLP read the same."""
        kinds, has_mlp = config.mixers_of(layer), config.has_mlp(layer)
        self.input_layernorm = stream_norm(config, dtype) if before and kinds else None
        self.mixers: list[Mixer] = []
        factors = dict(config.mixer_factors)
        self.factors = tuple(factors.get(kind, 1.0) for kind in kinds)
        """What multiplies the output of each mixer."""
        for kind in kinds:
            named = scheme.within(MIXER_NAMES[kind])
            mixer = new_mixer(kind, config, layer, dtype, parallel, named, rotation)
            self.add_module(MIXER_NAMES[kind], mixer)
            self.mixers.append(mixer)
        self.post_self_attn_layernorm = stream_norm(config, dtype) if behind and kinds else None
        between = before and not self.is_parallel and has_mlp
        self.post_attention_layernorm = stream_norm(config, dtype) if between else None
        experts = config.has_experts(layer)
        make_mlp = Experts if experts else MLP
        self.mlp = make_mlp(config, dtype, parallel, scheme.within("mlp")) if has_mlp else None
        self.mlp_factor = config.mlp_factor
        self.post_mlp_layernorm = stream_norm(config, dtype) if behind and has_mlp else None

    def forward(
        self, delta: Increment | None, x: Tensor, step: Step, narrow: Narrow | None = None
    ) -> tuple[Increment | None, Tensor]:
        """What this layer's last part adds to the residual stream, and the stream, x [T, hidden] float32,
        which this changes; with ``narrow``, [R, hidden] of both. ``delta`` is what the layer before adds;
        None: nothing."""
        if self.mixers:
            normed = self._after_adding(delta, x, self.input_layernorm)
            mixed = self._mixed(normed, step, narrow)
            delta = Increment(mixed, _norm(self.post_self_attn_layernorm))
            if self.mlp is not None and self.is_parallel:
                normed = normed if narrow is None else normed[narrow.rows]
                delta = Increment(mixed + self.mlp(normed))
        elif narrow is not None:
            after_adding(delta, x, None, torch.float32, self.factor)
            delta = None
        if narrow is not None:
            x = x[narrow.rows]
        if self.mlp is None or self.is_parallel:
            return delta, x
        normed = self._after_adding(delta, x, self.post_attention_layernorm)
        added = self.mlp(normed)
        added = added if self.mlp_factor == 1 else added.float() * self.mlp_factor
        return Increment(added, _norm(self.post_mlp_layernorm)), x

    def _mixed(self, normed: Tensor, step: Step, narrow: Narrow | None) -> Tensor:
        mixed: Tensor | None = None
        for mixer, factor in zip(self.mixers, self.factors, strict=True):
            added: Tensor = mixer(normed, step, narrow)
            added = added if factor == 1 else added.float() * factor
            mixed = added if mixed is None else mixed + added
        assert mixed is not None
        return mixed.to(self.dtype)

    def store(self, delta: Increment | None, x: Tensor, step: Step) -> None:
        """The part of ``forward`` that is needed where it yields no row: leaves in the pool what the layer
        keeps."""
        if self.mixers:
            normed = self._after_adding(delta, x, self.input_layernorm)
            for mixer in self.mixers:
                mixer.store(normed, step)

    def _after_adding(self, delta: Increment | None, x: Tensor, norm: RMSNorm | LayerNorm | None) -> Tensor:
        return after_adding(delta, x, _norm(norm), self.dtype, self.factor)

    @property
    def packed(self) -> LayerWeights | None:
        """The packed weights of the layer; None if any of them is not packed, or if the layer is of a kind
        that is computed piece by piece."""
        if self.mlp is None or len(self.mixers) != 1 or self.is_parallel:
            return None
        mixer, mlp = self.mixers[0], self.mlp.packed
        if mlp is None or self.mlp_factor != 1 or self.factors != (1.0,):
            return None
        if isinstance(mixer, LatentAttention):
            return self._packed_latents(mixer, mlp)
        return self._packed_attention(mixer, mlp) if isinstance(mixer, Attention) else None

    def _packed_attention(self, attention: Attention, mlp: PackedMLP) -> LayerWeights | None:
        qkv, o = attention.qkv_proj.packed, attention.o_proj.packed
        if attention.adjusts_queries or attention.is_gated or qkv is None or o is None:
            return None
        return LayerWeights(
            _norm(self.input_layernorm),
            _norm(self.post_attention_layernorm),
            qkv,
            o,
            mlp,
            attention.window,
            attention_post=_norm(self.post_self_attn_layernorm),
            mlp_post=_norm(self.post_mlp_layernorm),
            factor=self.factor,
            head_norm=attention.whole_norm or attention.norm_before_rotation,
            sinks=attention.sinks,
            softcap=attention.softcap,
            rope=attention.rotation,
        )

    def _packed_latents(self, attention: LatentAttention, mlp: PackedMLP) -> LayerWeights | None:
        down, o, latent = attention.down_proj.packed, attention.o_proj.packed, attention.packed
        if down is None or o is None or latent is None:
            return None
        return LayerWeights(
            _norm(self.input_layernorm),
            _norm(self.post_attention_layernorm),
            down,
            o,
            mlp,
            attention_post=_norm(self.post_self_attn_layernorm),
            mlp_post=_norm(self.post_mlp_layernorm),
            factor=self.factor,
            rope=attention.rotation,
            latent=latent,
        )


def _native_step(plan: TablePlan) -> CpuPlan | CpuLatentPlan | None:
    """The step of a CPU's kernels, if they compute it in one call with all others."""
    if isinstance(plan.step, CpuPlan):
        return plan.step
    if isinstance(plan, LatentPlan) and isinstance(plan.step, CpuLatentPlan) and not plan.expanded:
        return plan.step
    return None


def _place(layer: DecoderLayer) -> tuple[KVPlace, KVScales]:
    """The place and the scales of a layer's KV."""
    [mixer] = layer.mixers
    return mixer.place, mixer.scales if isinstance(mixer, Attention) else UNSCALED


def _norm(norm: RMSNorm | LayerNorm | None) -> Norm | None:
    return None if norm is None else norm.as_norm


def after_adding(
    delta: Increment | None, x: Tensor, norm: Norm | None, dtype: torch.dtype, factor: float
) -> Tensor:
    """Add ``delta`` times ``factor`` to the residual stream x [T, hidden], in place -> the ``norm`` of the
    sum, of type ``dtype``."""
    if delta is None:
        return add_norm(None, x, norm, dtype)
    return add_norm(delta.value, x, norm, dtype, post=delta.norm, factor=factor)


class Decoder(CausalLM):
    """A decoder-only model of any family."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, parallel: Parallel, scheme: QuantizationScheme
    ) -> None:
        super().__init__(config, dtype, parallel, scheme)
        shard, size = parallel.shard, config.hidden_size
        self.windows = frozenset(config.windows[layer] for layer in shard.layers)
        kinds: list[RopeConfig | None] = [*dict.fromkeys(config.ropes[layer] for layer in shard.layers)]
        self.ropes = nn.ModuleList(
            RotaryEmbedding(kind, config.head_dim, config.max_model_len) for kind in kinds
        )
        """The rotations of each kind of layer."""
        tied = config.tie_word_embeddings
        self.embed_tokens = None
        if shard.is_first_stage or (tied and shard.is_last_stage):
            self.embed_tokens = Embedding(shard.vocab, size, dtype, is_part=shard.tp_size > 1)
        # By the layer's number in the whole model, which is its name in the checkpoint.
        self.layers = nn.ModuleDict()
        for layer in shard.layers:
            rotation = kinds.index(config.ropes[layer])
            named = scheme.within(f"model.layers.{layer}")
            self.layers[str(layer)] = DecoderLayer(config, layer, rotation, dtype, parallel, named)
        self.norm = stream_norm(config, dtype) if shard.is_last_stage else None
        with_head = shard.is_last_stage and not tied
        bias = config.head_bias
        named = scheme.within("lm_head")
        self.lm_head = Linear(size, shard.vocab, dtype, bias=bias, scheme=named) if with_head else None
        self._head: Multiplier | None = None
        """The output head, once it is packed; on the last stage alone."""
        self.stack: LayerStack | None = None
        """The layers as one call, where one rank has all of each layer and a CPU's kernels compute them."""
        self.layout: KVLayout | None = None

    def forward(self, token_ids: Tensor, batch: PagedBatch, pool: Tensor) -> Tensor:
        step = self._step(batch, pool)
        # The residual stream stays in float32: every layer adds to it, and in bfloat16 each sum would round
        # all earlier ones (transformers does; it costs up to half as much again in accuracy).
        x: Tensor
        if self.shard.is_first_stage:
            x = self._embedded(token_ids)
        else:
            shape = len(token_ids), self.config.hidden_size
            x = self.collectives.take_over(torch.empty(shape, dtype=torch.float32, device=token_ids.device))
        layers = self._layers
        if self.norm is None:
            delta, x = self._through(layers, x, step)
            after_adding(delta, x, None, torch.float32, self.config.residual_scale)
            self.collectives.pass_on(x)
            return x if batch.wanted is None else x[: len(batch.wanted.rows)]
        if batch.wanted is None:
            delta, x = self._through(layers, x, step)
        else:
            *before, last = layers
            delta, x = self._through(before, x, step)
            if not len(batch.wanted.rows):
                last.store(delta, x, step)
                return x[:0].to(self.dtype)
            delta, x = last(delta, x, step, self._narrow(batch.wanted, batch, step))
        return after_adding(delta, x, self.norm.as_norm, self.dtype, self.config.residual_scale)

    def lay_out(self, layout: KVLayout) -> None:
        self.layout = layout
        for layer in self._layers:
            for mixer in layer.mixers:
                mixer.lay_out(layout.place_of(mixer.number, mixer.kv), layout.has_layer_scales)
        if self.stack is not None:
            self.stack.lay_out(*zip(*map(_place, self._layers), strict=True))

    @property
    def _layers(self) -> list[DecoderLayer]:
        return cast(list[DecoderLayer], list(self.layers.values()))

    def _step(self, batch: PagedBatch, pool: Tensor) -> Step:
        """The inputs that all layers have in common."""
        views = self._views(pool)
        rotations = [rope(batch.positions, batch.lengths) for rope in self.ropes]
        scale, factors = self.config.query_scale, None
        if scale is not None:
            periods = ((batch.positions + scale.shift) / scale.period).floor()
            factors = (1 + scale.beta * torch.log1p(periods))[:, None, None]
        return Step(views, self._plans(batch, views), rotations, factors, self._states(batch, pool))

    def _views(self, pool: Tensor) -> tuple[Tensor, ...]:
        """The pool as the blocks of each table."""
        if self.layout is None or pool.dim() > 2:
            return (pool,)
        shapes = [self.layout.view_shape(table, len(pool)) for table in range(self.layout.num_tables)]
        if self.layout.scale_bytes:
            return tuple(scaled_view(pool, shape) for shape in shapes)
        return tuple(pool.view(shape) for shape in shapes)

    def _plans(self, batch: PagedBatch, views: Sequence[Tensor]) -> tuple[TablePlan, ...]:
        heads = len(self.shard.heads)
        if self.layout is None:
            return (AttentionPlan.build(batch.of_table(0), views[0], self.windows, heads),)
        return tuple(
            self._plan(batch.of_table(table), views[table], group.kv)
            for group in self.layout.token_groups
            for table in group.tables
        )

    def _plan(self, batch: PagedBatch, view: Tensor, kv: LayerKV) -> TablePlan:
        """The plan of a table of the layers that keep this."""
        assert isinstance(kv, TokenKV)
        heads = len(self.shard.heads)
        if kv.kind == "latent":
            return LatentPlan.build(batch, view, heads, self._expands)
        return AttentionPlan.build(batch, view, {kv.window}, heads)

    def _expands(self, chunk: Chunk) -> bool:
        assert self.config.latent is not None
        return self.config.latent.expands(chunk.length, chunk.context)

    def _states(self, batch: PagedBatch, pool: Tensor) -> States | None:
        if self.layout is None or self.layout.state is None:
            return None
        assert batch.states is not None
        rows = batch.states.described if pool.is_cuda else batch.states
        return States(pool.view(torch.float32), rows, self.layout.state)

    def _through(
        self, layers: Sequence[DecoderLayer], x: Tensor, step: Step
    ) -> tuple[Increment | None, Tensor]:
        """Runs ``layers``, the first layers of the model. Returns what the last one adds to the residual
        stream, and the stream."""
        plans = [native for plan in step.plans if (native := _native_step(plan)) is not None]
        if self.stack is not None and layers and len(plans) == len(step.plans):
            added = self.stack.run(len(layers), x, step.views, plans, step.rotations, step.query_factors)
            return Increment(added, _norm(layers[-1].post_mlp_layernorm)), x
        delta: Increment | None = None
        for layer in layers:
            delta, x = layer(delta, x, step)
        return delta, x

    def _narrow(self, wanted: WantedRows, batch: PagedBatch, step: Step) -> Narrow:
        """The inputs of the whole model's last layer in a step whose ``wanted`` rows alone are needed. Only
        the plans of the tables that this layer reads are made."""
        plans = list(step.plans)
        for mixer in self._layers[-1].mixers:
            if not isinstance(mixer.kv, TokenKV):
                continue
            table = mixer.place.table
            of_table = batch.of_table(table)
            assert of_table.wanted is not None
            plans[table] = self._plan(of_table.narrowed(of_table.wanted), step.views[table], mixer.kv)
        return Narrow(wanted.rows, plans)

    def embed(self, token_ids: Tensor) -> Tensor:
        return self._embedded(token_ids).to(self.dtype)

    def _embedded(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] -> the residual stream in front of the first layer, [T, hidden] float32."""
        assert self.embed_tokens is not None
        embedded = self.collectives.sum(self.embed_tokens(token_ids)).float()
        scale = self.config.embedding_scale
        return embedded if scale == 1 else embedded * scale

    def logits(self, hidden: Tensor) -> Tensor:
        if self.shard.is_last_stage:
            assert self._head is not None, "not packed"
            # A single rank computes float32 at once; other ranks expect the weights' type.
            whole = torch.float32 if self.shard.world == 1 else None
            part = self._head.multiply(hidden, whole)
        else:
            part = hidden[:, :0].to(self.dtype)
        logits = self.collectives.collect(part).float()
        if self.config.logits_scale != 1:
            logits = logits.mul_(self.config.logits_scale)
        cap = self.config.logits_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def pack(self) -> None:
        for module in self.modules():
            if isinstance(module, Linear | Experts | Mixer):
                module.pack()
                if isinstance(module, Mixer):  # some have weights that are computed from what was loaded
                    give_back_free_memory()
        if (mixture := next((m for m in self.modules() if isinstance(m, Experts)), None)) is not None:
            mixture.warm_up()
        self.stack = self._stacked()
        self._head = self._packed_head()

    def _packed_head(self) -> Multiplier | None:
        """The output head, once modules are packed. The embedding finds its rows there if it is the same."""
        if self.lm_head is not None:
            return self.lm_head.multiplier
        tied = self.tied_head()
        if tied is None:
            return None
        head = tied.pack()
        if isinstance(head, PackedWeight) and head.has_rows:
            assert self.embed_tokens is not None
            self.embed_tokens.look_up_in(head)
        return head

    def tied_head(self) -> LinearWeights | None:
        """The output head, made of the embedding; None: it is not here, or has weights of its own."""
        if not self.shard.is_last_stage or self.lm_head is not None:
            return None
        assert self.embed_tokens is not None and self.embed_tokens.weight is not None, "not packed"
        return self.scheme.tied(self.embed_tokens.weight)

    def _stacked(self) -> LayerStack | None:
        layers = [cast(DecoderLayer, layer).packed for layer in self.layers.values()]
        packed = [layer for layer in layers if layer is not None]
        if self.shard.tp_size > 1 or not packed or len(packed) < len(layers):
            return None
        return LayerStack(packed, heads=len(self.shard.heads), scale=self.config.scale)

    def checkpoint_tensors(self) -> dict[str, Place]:
        places: dict[str, Place] = {}
        placed = set[nn.Module]()
        for path, module in self.named_modules():
            # Everything but the output head lies under "model." in checkpoints.
            name = path if path == "lm_head" else f"model.{path}"
            if module in placed:
                continue
            if isinstance(module, Linear):
                places |= _places(name, module)
                continue
            if isinstance(module, Experts):
                places |= {f"{name}.{part}": place for part, place in module.places().items()}
                placed.update(module.placed)
                continue
            source: tuple[Index, ...] = (slice(None),)
            if isinstance(module, Embedding | RMSNorm | LayerNorm):
                source = module.source
            elif isinstance(module, PlacesItself):
                places |= {f"{name}.{part}": place for part, place in module.places().items()}
                continue
            for kind, parameter in module.named_parameters(recurse=False):
                places[f"{name}.{kind}"] = Place(parameter, source)
        return {checkpoint_name(self.config, name): place for name, place in places.items()}


def checkpoint_name(config: ModelConfig, name: str) -> str:
    """The checkpoint's name of a tensor."""
    for ours, theirs in config.names:
        if ours in name:
            return name.replace(ours, theirs)
    return name


def _places(name: str, module: Linear) -> dict[str, Place]:
    """The places of a module's tensors, by their names in the checkpoint; none once its weights are given
    up."""
    if module.weights is None:
        return {}
    parent = name.rpartition(".")[0]
    return {
        f"{parent}.{part}.{kind}" if part else f"{name}.{kind}": place
        for part, tensors in module.weights.places().items()
        for kind, place in tensors.items()
    }
