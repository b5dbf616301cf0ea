"""All layers of a model as one call of the CPU's kernels: in a decode step, calling the layers'
kernels one by one from Python takes a fifth of the time of the kernels themselves."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton_kernels.cpu.attention import CpuPlan, numbers_of_heads, window_number
from baton_kernels.cpu.checks import check_shape
from baton_kernels.cpu.experts import NativeExperts, NativeRouting, PackedExperts
from baton_kernels.cpu.latent import WIDTH, CpuLatentPlan
from baton_kernels.cpu.library import KINDS, pointer
from baton_kernels.cpu.linear import NativeProjection, PackedWeight
from baton_kernels.cpu.rows import NativeNorm, takes
from baton_kernels.kv_fp8 import FP8, UNSCALED, KVScales
from baton_kernels.kv_layout import KVPlace
from baton_kernels.latent_norms import LatentNorms
from baton_kernels.norm import Norm
from baton_kernels.rotary import HeadNorm, WholeNorm
from baton_kernels.routing_rule import Routing
from baton_kernels.window import Window

_POINTER, _COUNT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class _Mixture(ctypes.Structure):
    _fields_ = (
        ("router", NativeProjection),
        ("routing", NativeRouting),
        ("experts", NativeExperts),
        *((name, NativeProjection) for name in ("shared_gate_up", "shared_down", "shared_gate")),
        ("weighs_input", ctypes.c_int),
        ("router_is_float", ctypes.c_int),
    )


class _LatentLayer(ctypes.Structure):
    _fields_ = (
        ("queries", NativeProjection),
        ("norms", NativeNorm * 2),
        ("up", _POINTER),
        *((name, _COUNT) for name in ("q_rank", "kv_rank", "nope_dim", "rope_dim", "value_dim")),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, NativeNorm) for name in ("input_norm", "mlp_norm", "attention_post", "mlp_post")),
        *((name, _POINTER) for name in ("q_norm", "k_norm", "sinks")),
        *((name, NativeProjection) for name in ("qkv", "o", "gate_up", "down")),
        ("mixture", ctypes.POINTER(_Mixture)),
        ("latent", ctypes.POINTER(_LatentLayer)),
        *((name, _COUNT) for name in ("window", "angles", "table", "index")),
        *((name, _FLOAT) for name in ("head_eps", "head_offset", "softcap", "factor")),
        ("whole_heads", ctypes.c_int),
        *((name, _FLOAT) for name in ("k_scale", "v_scale")),
    )


class _Stack(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.POINTER(_Layer)),
        ("hidden", _COUNT),
        ("heads", _COUNT),
        ("scale", _FLOAT),
    )


class _Angles(ctypes.Structure):
    _fields_ = (("cos", _POINTER), ("sin", _POINTER))


class _Run(ctypes.Structure):
    _fields_ = (("start", _COUNT), ("length", _COUNT), ("context", _COUNT), ("table", _POINTER))


class NativeTable(ctypes.Structure):
    """A step's blocks as the layers of one table see them."""

    _fields_ = (
        *((name, _POINTER) for name in ("shape", "blocks", "tables", "runs")),
        ("width", _COUNT),
        ("contexts", _POINTER),
    )


class NativeStep(ctypes.Structure):
    """The inputs and outputs of the layers in one step."""

    _fields_ = (
        *((name, _POINTER) for name in ("pool", "residual", "delta", "scratch", "angles")),
        *((name, _POINTER) for name in ("tables", "offsets", "contexts", "factors", "seconds")),
        *((name, _COUNT) for name in ("tokens", "decodes", "num_runs")),
    )


@dataclass(frozen=True, slots=True)
class MixtureWeights:
    """The weights of a mixture of experts."""

    router: PackedWeight
    routing: Routing
    correction: Tensor | None
    """[experts] float32: see ``baton_kernels.routing.route``."""
    experts: PackedExperts
    shared: tuple[PackedWeight, PackedWeight] | None = None
    """The gate and up, and the down projection of the MLP that is for every token; None: there is none."""
    shared_gate: PackedWeight | None = None
    """The projection to the logit of that MLP's factor; None: the factor is 1."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes that the memory of a step depends on."""
        native = self.experts.native
        own = self.routing.top_k, self.router.dtype.itemsize, self.inner
        return (native.experts, native.hidden, native.inner, *own)

    @property
    def inner(self) -> int:
        """The inner rows of the MLP that is for every token; 0: there is none."""
        return 0 if self.shared is None else self.shared[1].inputs


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """What attention over latents has besides the projection to latents, which is the layer's ``qkv``."""

    queries: PackedWeight
    """The projection of the latent of queries or, if they have none, of the layer's input."""
    norms: LatentNorms
    up: Tensor
    """[heads, nope_dim + value_dim, kv_rank]: what makes each head's key and value of a latent."""
    nope_dim: int
    rope_dim: int
    value_dim: int

    @property
    def numbers(self) -> int:
        """Numbers per token of the memory between the projection to latents and the output's."""
        heads, _, rank = self.up.shape
        return self.norms.q_rank + self.queries.outputs + heads * (2 * rank + self.rope_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one layer and what else it has of its own. The norms' weights have the type of the
    activations."""

    input_norm: Norm | None
    """The norm of the residual stream before attention; None: no norm."""
    mlp_norm: Norm | None
    """The norm of the residual stream before the MLP; None: no norm."""
    qkv: PackedWeight
    o: PackedWeight
    mlp: tuple[PackedWeight, PackedWeight] | MixtureWeights
    """The gate and up, and the down projection; or the experts instead."""
    window: Window | None = None
    attention_post: Norm | None = None
    """The norm of attention's output before it is added to the residual stream."""
    mlp_post: Norm | None = None
    """The norm of the MLP's output before it is added to the residual stream."""
    factor: float = 1.0
    """The factor of both outputs as they are added."""
    head_norm: HeadNorm | WholeNorm | None = None
    sinks: Tensor | None = None
    """[heads] float32: see ``baton_kernels.attention.paged_attention``."""
    softcap: float | None = None
    rope: int = 0
    """The index of the layer's rotation among those of the step."""
    latent: LatentWeights | None = None
    """What attention over latents has; None: attention is over K and V."""


class LayerStack:
    """Layers of the same sizes, of which the first has no layer before it."""

    def __init__(self, layers: Sequence[LayerWeights], *, heads: int, scale: float) -> None:
        """ValueError for weights that the kernels would misread."""
        self._weights = tuple(layers)  # kept: the kernels have their addresses
        first = layers[0]
        self._hidden, self._dtype = first.qkv.inputs, first.qkv.dtype
        inner = max(_inner(layer) for layer in layers)
        attention = max(layer.qkv.outputs + _between(layer) for layer in layers)
        self._scratch = self._hidden + attention + inner
        """Numbers per token of the scratch memory of a layer."""
        for layer in layers:
            _check(layer, heads, self._dtype)
        mixtures = [layer.mlp for layer in layers if isinstance(layer.mlp, MixtureWeights)]
        if len({mixture.sizes for mixture in mixtures}) > 1:
            raise ValueError("mixtures of other sizes: their memory is that of the first")
        self._last_rope = max(layer.rope for layer in layers)
        self._mixtures = [_mixture(layer.mlp) for layer in layers]
        self._latents = [_latent(layer.latent) for layer in layers]
        self._layers = (_Layer * len(layers))(*map(_layer, layers, self._mixtures, self._latents))
        self._heads = heads
        self.lay_out([KVPlace(0, index) for index in range(len(layers))])
        self._stack = _Stack(self._layers, self._hidden, heads, scale)

    def lay_out(self, places: Sequence[KVPlace], scales: Sequence[KVScales] | None = None) -> None:
        """Have the layers' KV at these places of the pool, with these scales (None: of a pool that has none).
        Before, it is in table 0, in the layers' order, without scales."""
        scales = [UNSCALED] * len(places) if scales is None else scales
        self._places = tuple(places)
        self._known: tuple[tuple[torch.Size, torch.dtype, type], ...] = ()
        """The views and plans that the layers were compared with."""
        self._turned: dict[int, int] = {}
        """The dimensions of a head that each rotation turns."""
        for layer, place, of_kv in zip(self._layers, places, scales, strict=True):
            layer.table, layer.index = place.table, place.index
            layer.k_scale, layer.v_scale = of_kv.k, of_kv.v

    def run(
        self,
        count: int,
        x: Tensor,
        views: Sequence[Tensor],
        plans: Sequence[CpuPlan | CpuLatentPlan],
        rotations: Sequence[tuple[Tensor, Tensor]],
        factors: Tensor | None = None,
    ) -> Tensor:
        """Runs the first ``count`` layers, at least one. Returns the last one's output for the residual
        stream, without its ``mlp_post`` and ``factor``; the stream, x [T, hidden] in float32, is changed in
        place.

        ``views``: the pool as the blocks of each table; ``plans``: the plan of each table, of the same rows.
        Each rotation is a cos and a sin, [T, 1, head_dim] in float32, as ``baton_kernels.rotary.rotate``
        takes them. ``factors`` [T, 1, 1]: of the queries of latents; None: 1. Plans of latents are those of
        steps whose rows are all absorbed. ValueError for any of these that is not of the layers' sizes."""
        self._check(count, x, views, plans, rotations)
        tokens, batch = len(x), plans[0].batch
        delta = torch.empty((tokens, self._hidden), dtype=self._dtype)
        scratch = torch.empty(tokens * self._scratch, dtype=self._dtype)
        angles, kept_angles = _angles(rotations)
        tables, kept_runs = _tables(plans)
        kept_factors = None if factors is None else factors.float().contiguous()
        step = NativeStep(
            pool=views[0].data_ptr(),
            residual=x.data_ptr(),
            delta=delta.data_ptr(),
            scratch=scratch.data_ptr(),
            angles=ctypes.addressof(angles),
            tables=ctypes.addressof(tables),
            offsets=batch.slot_offsets.data_ptr(),
            contexts=batch.decode_contexts.data_ptr(),
            factors=pointer(kept_factors),
            seconds=None,
            tokens=tokens,
            decodes=batch.num_decode,
            num_runs=len(batch.chunks),
        )
        kind, codes, first = KINDS[self._dtype], views[0].dtype == FP8, plans[0]
        first.kernels.layers(
            kind, codes, ctypes.addressof(self._stack), count, ctypes.addressof(step), first.threads
        )
        del kept_angles, kept_runs, kept_factors
        return delta

    def _check(
        self,
        count: int,
        x: Tensor,
        views: Sequence[Tensor],
        plans: Sequence[CpuPlan | CpuLatentPlan],
        rotations: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        """Check what ``run`` is given. The layers are compared with a view when its shape or type is new."""
        known = tuple((view.shape, view.dtype, type(plan)) for view, plan in zip(views, plans, strict=True))
        if known != self._known:
            layers = zip(self._weights, self._places, strict=True)
            self._turned = {each.rope: self._turned_in(each, place, known) for each, place in layers}
            self._known = known
        tokens = len(x)
        if any(
            v.shape != p.view or len(p.batch.slot_blocks) != tokens for v, p in zip(views, plans, strict=True)
        ):
            raise ValueError(f"the step of {tokens} tokens was planned for other tokens, or for another pool")
        check_shape("the stream", x, (tokens, self._hidden), torch.float32)
        if not 0 < count <= len(self._weights):
            raise ValueError(f"layers are {count}; allowed: 1 to {len(self._weights)}")
        if len(rotations) <= self._last_rope:
            raise ValueError(f"rotations are {len(rotations)}; the layers use {self._last_rope + 1}")
        for rope, dim in self._turned.items():
            for angles in rotations[rope]:
                check_shape("a rotation", angles, (tokens, 1, dim), torch.float32)

    def _turned_in(
        self, weights: LayerWeights, place: KVPlace, known: Sequence[tuple[torch.Size, torch.dtype, type]]
    ) -> int:
        """The dimensions of a head that a layer turns. ValueError unless its sizes are those of its place in
        the pool."""
        if place.table >= len(known):
            raise ValueError(f"a layer keeps what it does in table {place.table}, of {len(known)}")
        view, dtype, plan = known[place.table]
        _, kv_heads, layers, vectors, _, dim = view
        latent, fits = weights.latent, place.index < layers and dtype == known[0][1]
        if latent is not None:
            turned, rank = latent.rope_dim, latent.norms.kv_rank
            fits &= plan is CpuLatentPlan and dtype == self._dtype and (kv_heads, vectors) == (1, 1)
            fits &= dim == rank + turned and weights.qkv.outputs == latent.norms.q_rank + dim
            kept = f"latents of {rank} + {turned}"
        else:
            turned = dim
            fits &= plan is CpuPlan and dtype in (self._dtype, FP8) and vectors == 2
            fits &= self._heads % kv_heads == 0 and weights.o.inputs == self._heads * dim
            fits &= weights.qkv.outputs == (self._heads + 2 * kv_heads) * dim
            kept = f"K and V of {weights.qkv.outputs - weights.o.inputs} numbers a token"
        if not fits:
            raise ValueError(
                f"a layer of {self._heads} heads, {self._dtype}, keeps {kept} at {place.index} of a pool "
                f"{tuple(view)} {dtype}, planned by {plan.__name__}"
            )
        return turned


def _angles(
    rotations: Sequence[tuple[Tensor, Tensor]],
) -> tuple[ctypes.Array[_Angles], list[tuple[Tensor, Tensor]]]:
    """Rotations as the kernels take them, and the memory that this names."""
    kept = [(cos.contiguous(), sin.contiguous()) for cos, sin in rotations]
    return (_Angles * len(kept))(*(_Angles(cos.data_ptr(), sin.data_ptr()) for cos, sin in kept)), kept


def _tables(
    plans: Sequence[CpuPlan | CpuLatentPlan],
) -> tuple[ctypes.Array[NativeTable], list[ctypes.Array[_Run]]]:
    """The plans' tables as the kernels take them, and the memory that this names beside the plans'."""
    kept: list[ctypes.Array[_Run]] = []
    tables = (NativeTable * len(plans))()
    for table, plan in zip(tables, plans, strict=True):
        chunks = plan.batch.chunks
        runs = (_Run * len(chunks))(*(_Run(c.start, c.length, c.context, c.table.data_ptr()) for c in chunks))
        kept.append(runs)
        table.shape = ctypes.addressof(plan.shape)
        table.blocks = plan.batch.slot_blocks.data_ptr()
        table.tables = plan.tables.data_ptr()
        table.runs = ctypes.addressof(runs)
        table.width = plan.tables.shape[1]
        if isinstance(plan, CpuLatentPlan):
            table.contexts = plan.contexts.data_ptr()
    return tables, kept


def _check(weights: LayerWeights, heads: int, dtype: torch.dtype) -> None:
    of_stream = weights.input_norm, weights.mlp_norm, weights.attention_post, weights.mlp_post
    of_heads = (weights.head_norm.q, weights.head_norm.k) if weights.head_norm else ()
    fits = all(takes(norm, dtype) for norm in of_stream)
    if not fits or any(weight.dtype != dtype or not weight.is_contiguous() for weight in of_heads):
        raise ValueError(f"a norm's weights are of another type than {dtype}, or strided")
    if (latent := weights.latent) is not None:
        native = takes(latent.norms.q, dtype) and takes(latent.norms.kv, dtype) and latent.up.dtype == dtype
        if not native or not latent.up.is_contiguous() or latent.up.shape[2] % WIDTH:
            raise ValueError(f"weights of latents are of another type than {dtype}, strided or uneven")
    if weights.sinks is not None and numbers_of_heads(weights.sinks, heads) is not weights.sinks:
        raise ValueError("the sinks are strided")


def _between(weights: LayerWeights) -> int:
    """Numbers per token of the memory between the first projection of attention and the MLP's."""
    return 2 * weights.o.inputs if weights.latent is None else weights.latent.numbers


def _latent(weights: LatentWeights | None) -> _LatentLayer | None:
    if weights is None:
        return None
    return _LatentLayer(
        queries=weights.queries.native,
        norms=(NativeNorm * 2)(NativeNorm.of(weights.norms.q), NativeNorm.of(weights.norms.kv)),
        up=pointer(weights.up),
        q_rank=weights.norms.q_rank,
        kv_rank=weights.norms.kv_rank,
        nope_dim=weights.nope_dim,
        rope_dim=weights.rope_dim,
        value_dim=weights.value_dim,
    )


def _inner(weights: LayerWeights) -> int:
    """The inner rows of the layer's MLP, or of the one beside its experts."""
    mlp = weights.mlp
    return mlp.inner if isinstance(mlp, MixtureWeights) else mlp[1].inputs


def _mixture(mlp: tuple[PackedWeight, PackedWeight] | MixtureWeights) -> _Mixture | None:
    if not isinstance(mlp, MixtureWeights):
        return None
    experts = mlp.experts.native.experts
    mixture = _Mixture(
        router=mlp.router.native,
        routing=NativeRouting.of(mlp.routing, experts, mlp.correction),
        experts=mlp.experts.native,
        weighs_input=mlp.routing.weighs_input,
        router_is_float=mlp.router.dtype == torch.float32,
    )
    if mlp.shared is not None:
        mixture.shared_gate_up, mixture.shared_down = (weight.native for weight in mlp.shared)
    if mlp.shared_gate is not None:
        mixture.shared_gate = mlp.shared_gate.native
    return mixture


def _layer(weights: LayerWeights, mixture: _Mixture | None, latent: _LatentLayer | None) -> _Layer:
    heads, mlp = weights.head_norm, weights.mlp
    gate_up, down = (NativeProjection(), NativeProjection())
    if not isinstance(mlp, MixtureWeights):
        gate_up, down = (weight.native for weight in mlp)
    return _Layer(
        input_norm=NativeNorm.of(weights.input_norm),
        mlp_norm=NativeNorm.of(weights.mlp_norm),
        attention_post=NativeNorm.of(weights.attention_post),
        mlp_post=NativeNorm.of(weights.mlp_post),
        q_norm=pointer(heads.q if heads else None),
        k_norm=pointer(heads.k if heads else None),
        sinks=pointer(weights.sinks),
        qkv=weights.qkv.native,
        o=weights.o.native,
        gate_up=gate_up,
        down=down,
        mixture=None if mixture is None else ctypes.pointer(mixture),
        latent=None if latent is None else ctypes.pointer(latent),
        window=window_number(weights.window),
        angles=weights.rope,
        head_eps=heads.eps if heads else 0.0,
        head_offset=heads.offset if heads else 0.0,
        softcap=weights.softcap or 0.0,
        factor=weights.factor,
        whole_heads=isinstance(heads, WholeNorm),
        k_scale=1.0,
        v_scale=1.0,
    )
