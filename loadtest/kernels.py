"""The Triton kernels: their builds, and how near they come to the device's limits.

    python -m loadtest.kernels            # needs a CUDA device
    python -m loadtest.kernels --compile  # needs none
    python -m loadtest.kernels --check    # needs none

Without options, each attention kernel is measured (medians of triton's ``do_bench``, which empties the cache
between runs), with the bytes it must read or the operations it must do as a share of the bandwidth of a copy
and of the rate of a large matmul measured just before. torch's ``scaled_dot_product_attention`` stands beside
it, over the same lengths, contiguous instead of paged.

``--compile`` builds each kernel for compute capability 8.0, 9.0 and 10.0 and shows registers, shared memory
and spills. It fails if a kernel spills, or wants more shared memory than a device has.

``--tune`` needs a CUDA device as well. It finds the best tile sizes for common shapes and keeps them where
the kernels look for them (``baton_kernels.cuda.tuned``).

``--check`` does the same as ``--compile``, and beside it runs each kernel under triton's interpreter against
its float64 reference, over shapes that hold every pair of values of a shape's parameters: minutes, on two
cores.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from baton_kernels.activation import GELU_TANH, SILU, Activation
from baton_kernels.activation_kind import RELU2
from baton_kernels.expert_tensors import ExpertTensors, QuantizedExpertTensors
from baton_kernels.kv_fp8 import FP8
from baton_kernels.mamba_weights import GatedNorm
from baton_kernels.norm import Norm
from baton_kernels.paged import PagedBatch
from baton_kernels.quantized import QuantizedWeight
from baton_kernels.rotary import HeadNorm, WholeNorm
from baton_kernels.window import ChunkedWindow, Window
from loadtest.mixtures import MIXTURES
from tests.support.paged_steps import Case, lay_out, moved, sinks_of
from tests.support.quantized_cases import KINDS as QUANTIZED
from tests.support.quantized_cases import ROUNDED

if TYPE_CHECKING:
    from loadtest.kernel_builds import Build

ARCHS = (80, 90, 100)
BUILT_DTYPES = ("bfloat16", "float32")
HEAD_DIMS = (64, 96, 128, 256)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
FP8_KV = "fp8 KV"
"""The type of attention in bfloat16 over a pool of FP8."""
POOL_DTYPES = {**DTYPES, FP8_KV: FP8}
QUERY_DTYPES = {**DTYPES, FP8_KV: torch.bfloat16}
STEPS: dict[str, Case] = {
    "decode": Case(8, 2, 0, 64, None, (200, 70), ()),
    "verify, 32 rows": Case(8, 2, 0, 64, None, (200, 70), (), queries=5),
    "verify, 64 rows": Case(8, 2, 0, 64, None, (200, 70), (), queries=9),
    "chunks, 16 rows": Case(8, 2, 0, 64, None, (), ((100, 4),)),
    "chunks, 32 rows": Case(8, 2, 0, 64, None, (), ((100, 8),)),
    "chunks, 64 rows": Case(8, 2, 0, 64, None, (), ((100, 16),)),
    "prefill": Case(8, 2, 0, 64, None, (), ((100, 200),)),
}
"""Steps that are computed by one kernel each."""
FEATURES: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "-": {},
        "window, soft-cap": {"window": 40, "softcap": 30.0, "block_size": 16},
        "runs, cap, sinks": {
            "window": ChunkedWindow(40),
            "softcap": 30.0,
            "has_sinks": True,
            "block_size": 16,
        },
    }
)
"""What attention may do beside, in blocks that are smaller than a tile."""
EXPERT_KINDS = ("int8 rows", "fp8 groups of 128", "int4 groups of 32", "int4 groups of 128, zeros", "NVFP4")
"""Quantized weights of experts, by their names in ``QUANTIZED``."""
ALL = "runs, cap, sinks"


@dataclass(frozen=True)
class Variant:
    step: str
    head_dim: int
    dtype: str
    features: str
    """One of ``FEATURES``."""

    @property
    def case(self) -> Case:
        case = replace(STEPS[self.step], head_dim=self.head_dim, dtype=QUERY_DTYPES[self.dtype])
        changes: Mapping[str, Any] = FEATURES[self.features]
        return replace(case, **changes)


def variants(
    dtypes: Sequence[str], steps: Sequence[str], features: Iterable[str], head_dims: Sequence[int]
) -> Iterator[Variant]:
    for dtype in dtypes:
        for head_dim in head_dims:
            for step in steps:
                for named in features:
                    if fits_decode(step, head_dim, dtype):
                        yield Variant(step, head_dim, dtype, named)


def fits_decode(step: str, head_dim: int, dtype: str) -> bool:
    """Whether the rows of a sequence stand in one tile of decode, where the step's name says how many there
    are."""
    from baton_kernels.cuda.shapes import Shape

    rows = re.search(r"(\d+) rows", step)
    return rows is None or int(rows[1]) <= Shape(64, head_dim, POOL_DTYPES[dtype], 90).most_rows


@dataclass(frozen=True)
class Launch:
    """A kernel's launch, for a line of the table."""

    kernel: str
    size: str
    """The head size, or the model."""
    dtype: str
    features: str
    run: Callable[[int], object]
    """The launch, for a compute capability."""

    @classmethod
    def attention(cls, variant: Variant) -> Launch:
        from baton_kernels.cuda.attention import CudaPlan
        from baton_kernels.cuda.shapes import Device

        def run(arch: int) -> Tensor:
            case = variant.case
            pool, batch = lay_out(case)
            pool = pool.to(POOL_DTYPES[variant.dtype])
            q = torch.zeros(batch.positions.numel(), case.heads, case.head_dim, dtype=case.dtype)
            plan = CudaPlan.build(batch, pool, {case.window}, case.heads, Device(132, arch))
            how: dict[str, Any] = {"scale": 0.1, "window": case.window, "softcap": case.softcap}
            return plan.attend(pool, 0, q, sinks=sinks_of(case), **how)

        return cls(variant.step, str(variant.head_dim), variant.dtype, variant.features, run)


def head_launches(dtype: str, head_dims: Sequence[int]) -> Iterator[Launch]:
    """Yield the launches of the kernels between the projection and the pool."""
    from baton_kernels.cuda.attention import CudaPlan
    from baton_kernels.cuda.shapes import Device

    for head_dim in head_dims:
        case = replace(STEPS["decode"], head_dim=head_dim, dtype=QUERY_DTYPES[dtype])
        pool, batch = lay_out(case)
        pool = pool.to(POOL_DTYPES[dtype])
        qkv = torch.zeros(2, 12, head_dim, dtype=case.dtype)
        k, v = qkv[:, 8:10], qkv[:, 10:]
        norm = HeadNorm(qkv[0, 0], qkv[0, 0], 1e-5)

        def plan(arch: int, pool: Tensor, batch: PagedBatch) -> CudaPlan:
            return CudaPlan.build(batch, pool, {None}, 8, Device(132, arch))

        def turn(arch: int, pool: Tensor, batch: PagedBatch, qkv: Tensor, norm: HeadNorm | None) -> Tensor:
            angles = torch.zeros(2, 1, qkv.shape[2])
            on = plan(arch, pool, batch)
            return on.rotate_and_store(pool, 0, qkv, cos=angles, sin=angles, norm=norm)

        def write(arch: int, pool: Tensor, batch: PagedBatch, k: Tensor, v: Tensor) -> None:
            plan(arch, pool, batch).write_kv(pool, 0, k, v)

        step: dict[str, Any] = {"pool": pool, "batch": batch}
        named: dict[str, Callable[[int], object]] = {
            "rotate, store": partial(turn, **step, qkv=qkv, norm=None),
            "norm, rotate, store": partial(turn, **step, qkv=qkv, norm=norm),
            "KV write": partial(write, **step, k=k, v=v),
        }
        for name, launch in named.items():
            yield Launch(name, str(head_dim), dtype, "-", launch)


def anywhere(launch: Callable[[], object]) -> Callable[[int], object]:
    """Wrap a launch that is the same for every compute capability."""
    return lambda _: launch()


def row_launches(dtype: str) -> Iterator[Launch]:
    """Yield the launches over the rows of an 8B Llama, and over its blocks."""
    from baton_kernels.cuda import blocks, logits, rows, sampling

    wide = torch.zeros(2, 28672, dtype=DTYPES[dtype])
    hidden = wide[:, :4096].contiguous()
    pool = torch.zeros(2, 8, 2, 2, 64, 128, dtype=DTYPES[dtype])
    ids = torch.zeros(2, dtype=torch.int64)
    scores, words = torch.zeros(2, 128256), torch.zeros(2, 4008, dtype=torch.int32)
    few, numbers = torch.zeros(9, dtype=torch.int32), torch.zeros(9)
    rules = (few[:2], few[:7], numbers[:6].view(3, 2), few, numbers)
    settings, seeds = torch.zeros(4, 2, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.int64)
    named: dict[str, Callable[[], object]] = {
        **_norms(hidden),
        "SiLU, mul": partial(rows.gated_product, wide, SILU),
        "GELU, mul": partial(rows.gated_product, wide, GELU_TANH),
        "clamped SwiGLU": partial(rows.gated_product, wide, Activation("clamped_swiglu", 7.0)),
        "GELU": partial(rows.activated, wide, GELU_TANH),
        "squared ReLU": partial(rows.activated, wide, RELU2),
        "block copy": partial(blocks.copy_blocks, pool, ids, pool, ids),
    }
    if dtype == "bfloat16":  # built once: these depend on no dtype
        named |= {
            "mask": partial(logits.bar_tokens, scores, ids, words),
            "rules": partial(logits.adjust, scores, *rules),
            "draw": partial(sampling.draw, scores, settings, seeds),
        }
    for name, launch in named.items():
        yield Launch(name, "-", dtype, "-", anywhere(launch))


def _norms(hidden: Tensor) -> dict[str, Callable[[], object]]:
    """The launches of norms: of the sum with the residual, and of all heads together."""
    from baton_kernels.cuda import rows, whole_norm

    residual, weight = torch.zeros(hidden.shape), hidden[0]
    rms, layer = Norm(weight, 1e-5), Norm(weight, 1e-5, centered=True, bias=weight)
    qkv, whole = hidden[:, :3072], WholeNorm(weight[:2048], weight[:512], 1e-5)
    sums = torch.zeros(len(qkv), 2)
    norm, dtype = partial(rows.add_norm, hidden, residual), hidden.dtype
    return {
        "add, RMS norm": partial(norm, rms, dtype),
        "RMS norm": partial(rows.add_norm, None, residual, rms, dtype),
        "layer norms, add": partial(norm, layer, dtype, post=layer, factor=0.5),
        "RMS norm, add": partial(norm, None, dtype, post=rms),
        "squares of heads": partial(whole_norm.squares_of_heads, qkv, whole),
        "scaling of heads": partial(whole_norm.scale_heads, qkv, sums, whole, (4096, 1024)),
        "norm of heads": partial(whole_norm.norm_heads, qkv, whole),
    }


def expert_launches(dtype: str, models: Sequence[str], all_ranks: Sequence[int]) -> Iterator[Launch]:
    """Yield the launches over the experts of one rank out of so many: the router's, and for each size of
    tiles one of all others."""
    from baton_kernels.cuda import routing

    host = torch.device("cpu")
    for model, ranks in product(models, all_ranks):
        mixture = MIXTURES[model]
        tensors = mixture.tensors(DTYPES[dtype], ranks, host)
        of_model = model if ranks == 1 else f"{model} / {ranks}"
        logits = torch.zeros(2, mixture.experts, dtype=DTYPES[dtype])
        choose = partial(routing.route, logits, mixture.routing)
        yield Launch("router", of_model, dtype, "-", anywhere(choose))
        yield from steps_of(tensors, mixture.routing.top_k, of_model, "-")


def quantized_expert_launches(dtype: str, model: str, kinds: Iterable[str]) -> Iterator[Launch]:
    """Yield the launches over experts with quantized weights, for each size of tiles."""
    mixture = MIXTURES[model]
    plain = mixture.tensors(DTYPES[dtype], 1, torch.device("cpu"))
    for kind in kinds:

        def quantized(weight: Tensor, kind: str) -> QuantizedWeight:
            few = QUANTIZED[kind].weight(1, *weight.shape[1:])

            def of_all(part: Tensor) -> Tensor:
                return part.new_empty((len(weight), *part.shape[1:]))

            return replace(
                few,
                codes=of_all(few.codes),
                scales=of_all(few.scales),
                zeros=None if few.zeros is None else of_all(few.zeros),
                factors=None if few.factors is None else of_all(few.factors),
            )

        biases = plain.gate_up_bias, plain.down_bias
        both = quantized(plain.gate_up, kind), quantized(plain.down, kind)
        tensors = QuantizedExpertTensors(*both, *biases, plain.activation, plain.dtype)
        yield from steps_of(tensors, mixture.routing.top_k, model, kind)


def steps_of(
    tensors: ExpertTensors | QuantizedExpertTensors, top_k: int, model: str, features: str
) -> Iterator[Launch]:
    """Yield the launches over some experts, for each size of tiles."""
    from baton_kernels.cuda.expert_shapes import ExpertShape, token_counts
    from baton_kernels.cuda.experts import multiply
    from baton_kernels.cuda.shapes import Device

    def run(arch: int, tokens: int) -> Tensor:
        x = torch.zeros(tokens, tensors.down.shape[1], dtype=tensors.dtype)
        experts, weights = torch.zeros(tokens, top_k, dtype=torch.int32), torch.zeros(tokens, top_k)
        shape = ExpertShape.of(tensors, Device(132, arch))
        return multiply(x, experts, weights, tensors, weighs_input=False, shape=shape)

    shape = ExpertShape.of(tensors, Device(132, 90))
    dtype = str(tensors.dtype).removeprefix("torch.")
    for tokens in token_counts(shape, top_k):
        pairs = tokens * top_k
        name = "few pairs" if pairs <= shape.most_few else f"tiles of {shape.rows(pairs)}"
        yield Launch(name, model, dtype, features, partial(run, tokens=tokens))


def quantized_launches(dtype: str, kinds: Iterable[str], all_tokens: Sequence[int]) -> Iterator[Launch]:
    """Yield the launches of products with quantized weights, for steps of so many tokens."""
    from baton_kernels.cuda import products, quantized
    from baton_kernels.cuda.shapes import Device

    outputs, inputs = 4096, 4608
    finish = products.Finish(torch.zeros(outputs, dtype=DTYPES[dtype]), gated=True, activation=SILU)
    for kind, tokens in product(kinds, all_tokens):

        def run(arch: int, weight: QuantizedWeight, tokens: int) -> Tensor:
            x = torch.zeros(tokens, weight.shape[1], dtype=DTYPES[dtype])
            return quantized.multiply(x, weight, finish, device=Device(132, arch))

        weight = QUANTIZED[kind].weight(outputs, inputs)
        name = f"{kind}, {tokens} rows"
        yield Launch(name, f"{outputs} x {inputs}", dtype, "-", partial(run, weight=weight, tokens=tokens))


def rounded_launches(all_tokens: Sequence[int]) -> Iterator[Launch]:
    """Yield the launches of products of rounded activations; where there are no units for fp8, of plain
    ones with the same weights."""
    from baton_kernels.cuda import products, quantized
    from baton_kernels.cuda.shapes import Device
    from baton_kernels.cuda.weight_tiles import FP8_ARCH
    from baton_kernels.rounded_rows import RoundedRows, RowRounding, round_rows

    for (name, kind), tokens in product(ROUNDED.items(), all_tokens):

        def run(arch: int, weight: QuantizedWeight, tokens: int) -> Tensor:
            plain = torch.zeros(tokens, weight.shape[1], dtype=torch.bfloat16)
            rounding = RowRounding.of(weight)
            x: Tensor | RoundedRows = plain
            if arch >= FP8_ARCH and rounding is not None:
                x = round_rows(plain, rounding)
            return quantized.multiply(x, weight, products.Finish(), torch.float32, Device(132, arch))

        launch = partial(run, weight=kind.weight(4096, 4608), tokens=tokens)
        yield Launch(f"{name}, {tokens} rows", "4096 x 4608", "float32", "-", launch)


def rounding_launches(dtype: str) -> Iterator[Launch]:
    """Yield the launches that round activations: of rows, norms and gates."""
    from baton_kernels.cuda import rounding, rows
    from baton_kernels.rounded_rows import RowRounding

    wide = torch.zeros(2, 2 * 14336, dtype=DTYPES[dtype])
    hidden, residual = wide[:, :4096].contiguous(), torch.zeros(2, 4096)
    norm = Norm(hidden[0], 1e-5)
    of_groups, of_ints = RowRounding("fp8", 128), RowRounding("int8")
    for name, how in {"fp8 rows": RowRounding("fp8"), "fp8 groups": of_groups, "int8 rows": of_ints}.items():
        named: dict[str, Callable[[], object]] = {
            "round": partial(rounding.round_rows, hidden, how),
            "add, RMS norm, round": partial(
                rows.add_norm_rounded, hidden, residual, norm, DTYPES[dtype], how
            ),
            "SiLU, mul, round": partial(rows.gated_product_rounded, wide, SILU, how),
        }
        for kernel, launch in named.items():
            yield Launch(kernel, "-", dtype, name, anywhere(launch))


@dataclass(frozen=True)
class LatentModel:
    """The sizes of a model with latent attention, on one rank."""

    heads: int
    width: int
    kv_rank: int
    key_dim: int
    value_dim: int


LATENTS: Mapping[str, LatentModel] = MappingProxyType(
    {
        "DeepSeek-V3": LatentModel(128, 576, 512, 192, 128),
        "DeepSeek-V3 / 8": LatentModel(16, 576, 512, 192, 128),
        "GLM-4.7-Flash": LatentModel(20, 576, 512, 256, 256),
        "MiniCPM3": LatentModel(40, 288, 256, 96, 64),
        "Mistral-Small-4": LatentModel(32, 320, 256, 128, 128),
    }
)
LATENT_STEPS: Mapping[str, Case] = MappingProxyType(
    {
        "latents, decode": Case(1, 1, 0, 64, None, (200, 70), ()),
        "latents, verify": Case(1, 1, 0, 64, None, (200, 70), (), queries=3),
        "latents, chunk": Case(1, 1, 0, 64, None, (), ((100, 4),)),
        "latents, blocks of 16": Case(1, 1, 0, 16, None, (), ((100, 4),)),
    }
)


def latent_launches(dtype: str, models: Sequence[str], steps: Sequence[str]) -> Iterator[Launch]:
    """Yield the launches of latent attention: over the pool, and of a chunk that is expanded."""
    from baton_kernels.cuda.latent import CudaLatentPlan
    from baton_kernels.cuda.shapes import Device

    for name in models:
        model = LATENTS[name]
        for step in steps:
            case = replace(LATENT_STEPS[step], head_dim=model.width, dtype=DTYPES[dtype])

            def absorbed(arch: int, case: Case, model: LatentModel) -> Tensor:
                pool, batch = lay_out(case, layers=1)
                view = pool[:, :, :, :1].contiguous()
                q = torch.zeros(len(batch.positions), model.heads, model.width, dtype=case.dtype)
                plan = CudaLatentPlan.build(batch, batch, view, model.heads, Device(132, arch))
                return plan.attend(view, 0, q, scale=0.1, value_dim=model.kv_rank)

            yield Launch(step, name, dtype, "-", partial(absorbed, case=case, model=model))

        def expanded(arch: int, model: LatentModel) -> None:
            pool, batch = lay_out(Case(1, 1, model.width, 64, None, (), ((0, 70),), DTYPES[dtype]), layers=1)
            view = pool[:, :, :, :1].contiguous()
            plan = CudaLatentPlan.build(batch, batch, view, model.heads, Device(132, arch))
            k = torch.zeros(70, model.heads, model.key_dim, dtype=view.dtype)
            made = torch.zeros(70, model.heads, model.key_dim + model.value_dim, dtype=view.dtype)
            plan.attend_expanded(k, k, made[..., model.key_dim :], scale=0.1)
            plan.store(view, 0, plan.gather(view, 0, batch.chunks[0]))

        yield Launch("latents, expanded", name, dtype, "-", partial(expanded, model=model))


def state_launches(dtype: str, dims: Sequence[int], state_dims: Sequence[int]) -> Iterator[Launch]:
    """Yield the launches of layers that keep a state: linear attention of heads of ``dims``, Mamba-2 of
    states of ``state_dims``, and a short convolution."""
    from baton_kernels.cuda import causal_conv, delta_rule, mamba
    from tests.support import state_steps

    own, few = DTYPES[dtype], {"queries": 1, "chunks": ([40],), "taps": 3, "dtype": DTYPES[dtype]}
    for kind, dim in product(("gdn", "kda", "kda bounded", "lightning"), dims):
        delta = state_steps.DeltaCase.of({**few, "kind": kind, "heads": (2, 2), "dims": (dim, dim)})
        args = delta.layer, delta.inputs, delta.step.states, delta.step.rows
        yield Launch(kind, str(dim), dtype, "-", anywhere(partial(delta_rule.linear_attention, *args)))
    for state_dim in state_dims:
        limits = (0.0, float("inf"))
        sizes = {"units": 2, "heads": 2, "groups": "one a unit", "dims": (64, state_dim), "limits": limits}
        case = state_steps.MambaCase.of({**few, **sizes})
        scan = partial(
            mamba.mamba, case.projected, case.weights, case.sizes, case.step.states, case.step.rows
        )
        yield Launch("Mamba-2", f"64 x {state_dim}", dtype, "-", anywhere(scan))
    y, gate, weight = torch.zeros(2, 4096), torch.zeros(2, 4096, dtype=own), torch.zeros(4096)
    norm = partial(mamba.gated_norm, y, gate, GatedNorm(weight, 1e-5, 8, 512, True), own, None)
    yield Launch("gated norm", "-", dtype, "-", anywhere(norm))
    step = state_steps.StateStep.of(8, 2 * 256, ([40],), 1)
    rows, taps = torch.zeros(step.length, 3 * 2048, dtype=own), torch.zeros(3, 2048)
    short = partial(causal_conv.short_conv, rows, taps, None, step.states, step.rows)
    yield Launch("short conv", "-", dtype, "-", anywhere(short))


def build(wanted: Sequence[Launch]) -> bool:
    """Print the table; return whether every kernel fits its device."""
    from loadtest.kernel_builds import SHARED_MEMORY, building

    table = Table(title="registers a thread / bytes of shared memory / bytes spilled, by compute capability")
    for column in (
        "kernel",
        "head_dim, model",
        "type",
        "features",
        *(f"{arch / 10}" for arch in ARCHS),
    ):
        table.add_column(column)
    fits = True
    for launch in track(wanted, transient=True, disable=not sys.stderr.isatty()):
        by_arch = []
        for arch in ARCHS:
            with building(arch) as builder:
                launch.run(arch)
            by_arch.append(builder.builds)
            fits &= all(not one.spilled and one.shared <= SHARED_MEMORY[arch] for one in builder.builds)
        for number, of_each in enumerate(zip(*by_arch, strict=True)):
            name = launch.kernel if not number else f"{launch.kernel}: {of_each[0].kernel}"
            table.add_row(name, launch.size, launch.dtype, launch.features, *map(_cell, of_each))
    Console(width=210).print(table)
    return fits


def _cell(built: Build) -> str:
    core = ", ".join(sorted(built.instructions))
    return f"{built.registers} / {built.shared} / {built.spilled}{f' ({core})' if core else ''}"


def everything() -> list[Launch]:
    """Return all kernels in the shipped configurations."""
    found = [Launch.attention(v) for v in variants(BUILT_DTYPES, list(STEPS), FEATURES, HEAD_DIMS)]
    found += map(Launch.attention, variants(BUILT_DTYPES, ["decode", "prefill"], FEATURES, (48,)))
    found += map(Launch.attention, variants([FP8_KV], list(STEPS), ["-", ALL], HEAD_DIMS))
    found += head_launches(FP8_KV, HEAD_DIMS)
    for dtype in BUILT_DTYPES:
        found += [*head_launches(dtype, HEAD_DIMS), *row_launches(dtype)]
        # States of 256 spill where products are exact: float32 is for comparison there.
        states = (64, 128, 256) if dtype == "bfloat16" else (64, 128)
        found += state_launches(dtype, (64, 128), states)
    found += expert_launches("bfloat16", list(MIXTURES), (1, 2))
    found += expert_launches("float32", ["Qwen3-30B-A3B"], (1,))
    found += quantized_expert_launches("bfloat16", "gpt-oss-20b", ["MXFP4"])
    found += quantized_expert_launches("bfloat16", "Qwen3-30B-A3B", EXPERT_KINDS)
    found += quantized_launches("bfloat16", QUANTIZED, (16, 32, 64, 128))
    found += quantized_launches("float32", ["int4 groups of 64, zeros, order", "NVFP4"], (16, 64, 128))
    found += [*rounded_launches((16, 32, 64, 128)), *rounding_launches("bfloat16")]
    found += latent_launches("bfloat16", list(LATENTS), list(LATENT_STEPS))
    found += latent_launches("float32", ["DeepSeek-V3", "MiniCPM3"], list(LATENT_STEPS))
    return found


def the_largest() -> list[Launch]:
    """Return the launches that are most likely not to fit, and one of each other kernel."""
    largest = [
        *variants(["bfloat16"], ["decode", "prefill"], [ALL], (64, 128, 256)),
        *variants(["bfloat16"], ["verify, 64 rows"], [ALL], (128,)),
        *variants(["float32"], ["prefill"], [ALL], (48,)),
        *variants([FP8_KV], ["decode", "prefill"], [ALL], (128,)),
    ]
    router, few, *_, many = expert_launches("bfloat16", ["gpt-oss-20b"], (2,))
    gdn, kda, *_, mamba, norm, short = state_launches("bfloat16", (128,), (256,))
    return [
        *map(Launch.attention, largest),
        *head_launches("bfloat16", (256,)),
        next(head_launches(FP8_KV, (256,))),
        *row_launches("bfloat16"),
        *(router, few, many),
        *quantized_launches("bfloat16", ["int4 groups of 64, zeros, order"], (64,)),
        *latent_launches("bfloat16", ["DeepSeek-V3"], ["latents, chunk"]),
        *(gdn, kda, mamba, norm, short),
    ]


def check() -> bool:
    """Build all kernels in a process of its own, and check them in this process meanwhile; return whether
    both succeed."""
    import loadtest.kernel_checks as checks  # must come before any other import of triton

    command = [sys.executable, "-m", "loadtest.kernels", "--compile"]
    table = Table("kernel", "shapes", "largest difference, of what is tolerated", "seconds")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as builds:
        torch.set_num_threads(1)
        wrong = None
        try:
            for one in checks.check_all():
                table.add_row(one.kernel, str(one.cases), f"{one.worst:.2f}", f"{one.seconds:.0f}")
        except checks.WrongError as error:
            wrong = str(error)
        output, _ = builds.communicate()
    print(output, end="")
    Console(width=120).print(table)
    if wrong:
        print(wrong)
    return wrong is None and builds.returncode == 0


@dataclass(frozen=True)
class Roof:
    """The device's best rates."""

    bytes_per_s: float
    flops: float

    @classmethod
    def measure(cls, dtype: torch.dtype) -> Roof:
        source = torch.empty(1 << 29, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        copying = seconds(lambda: target.copy_(source))
        size = 8192
        a, b = torch.randn(2, size, size, device="cuda").to(dtype)
        return cls(2 * source.numel() / copying, 2 * size**3 / seconds(lambda: a @ b))


def seconds(run: Callable[[], object]) -> float:
    from triton.testing import do_bench

    return float(do_bench(run, return_mode="median")) / 1000


BENCHES: dict[str, Case] = {
    "decode, 1 x 32768": Case(32, 8, 128, 64, None, (32768,), ()),
    "decode, 64 x 4096": Case(32, 8, 128, 64, None, (4096,) * 64, ()),
    "decode, 256 x 1024": Case(32, 8, 128, 64, None, (1024,) * 256, ()),
    "decode, 131072 + 31 x 4096": Case(32, 8, 128, 64, None, (131072, *(4096,) * 31), ()),
    "decode, 64 x 4096, blocks of 16": Case(32, 8, 128, 16, None, (4096,) * 64, ()),
    "prefill, 8192": Case(32, 8, 128, 64, None, (), ((0, 8192),)),
    "prefill, 8 x 1024": Case(32, 8, 128, 64, None, (), ((0, 1024),) * 8),
    "prefill, 2048 behind 30720": Case(32, 8, 128, 64, None, (), ((30720, 2048),)),
    "prefill, 8192, blocks of 16": Case(32, 8, 128, 16, None, (), ((0, 8192),)),
    "prefill, 8192, window 1024": Case(32, 8, 128, 64, 1024, (), ((0, 8192),)),
}


def work(case: Case) -> tuple[int, int]:
    """Return the fewest bytes of K and V that must be read, and the operations: two products over the tokens
    that each query sees."""

    def seen(cached: int, length: int) -> int:
        """The tokens that ``length`` queries behind ``cached`` ones see together."""
        return cached + length - _first_seen(cached + 1, case.window)

    rows = [(context - 1, 1) for context in case.decode] + list(case.chunks)
    read = sum(seen(cached, length) for cached, length in rows)
    pairs = sum(seen(cached + i, 1) for cached, length in rows for i in range(length))
    bytes_read = 2 * read * case.kv_heads * case.head_dim * case.dtype.itemsize
    return bytes_read, 4 * pairs * case.heads * case.head_dim


def _first_seen(context: int, window: Window | None) -> int:
    from baton_kernels.cuda.shapes import window_start_of

    return 0 if window is None else max(0, window_start_of(context, window))


def contiguous(case: Case, device: torch.device) -> Callable[[], Tensor] | None:
    """Return torch's attention over the same lengths without pages; None where it would need a mask."""
    lengths = {(n - 1, 1) for n in case.decode} | set(case.chunks)
    if len(lengths) != 1 or case.window is not None:
        return None
    ((cached, length),) = lengths
    if cached and length > 1:
        return None
    count = len(case.decode) + len(case.chunks)
    shape = (count, case.heads, length, case.head_dim)
    q = torch.randn(shape, device=device).to(case.dtype)
    k, v = torch.randn(2, count, case.kv_heads, cached + length, case.head_dim, device=device).to(case.dtype)
    return lambda: scaled_dot_product_attention(q, k, v, is_causal=length > 1, enable_gqa=True)


def measure(dtype: torch.dtype) -> None:
    from baton_kernels.attention import AttentionPlan, paged_attention

    roof = Roof.measure(dtype)
    name = torch.cuda.get_device_name()
    title = f"{name}, {dtype}: copies {roof.bytes_per_s / 1e12:.2f} TB/s, matmul {roof.flops / 1e12:.0f} TF/s"
    table = Table("step", "ms", "GB/s", "of copy", "TF/s", "of matmul", "torch, contiguous: ms", title=title)
    for label, case in BENCHES.items():
        case = replace(case, dtype=dtype)
        bytes_read, operations = work(case)
        pool, batch = moved(*lay_out(case, layers=1), torch.device("cuda"))
        q = torch.randn(batch.positions.numel(), case.heads, case.head_dim, device="cuda").to(dtype)
        plan = AttentionPlan.build(batch, pool, {case.window}, case.heads)
        taken = seconds(
            partial(paged_attention, pool, 0, q, plan, scale=case.head_dim**-0.5, window=case.window)
        )
        beside = contiguous(case, torch.device("cuda"))
        table.add_row(
            label,
            f"{taken * 1e3:.3f}",
            f"{bytes_read / taken / 1e9:.0f}",
            f"{bytes_read / taken / roof.bytes_per_s:.0%}",
            f"{operations / taken / 1e12:.0f}",
            f"{operations / taken / roof.flops:.0%}",
            "-" if beside is None else f"{seconds(beside) * 1e3:.3f}",
        )
    Console(width=120).print(table)


def keep_tuned(dtype: torch.dtype) -> None:
    """Tune the attention kernels on this device, and keep tile sizes that are better than the defaults."""
    from baton_kernels.cuda import tuned
    from loadtest.kernel_tuning import tune

    device = torch.device("cuda")
    name = torch.cuda.get_device_name(device)
    path = tuned.cache_directory() / tuned.file_name(name)
    found = tune(device, dtype, seconds)
    tuned.write(path, name, {**(tuned.read(path, name) if path.is_file() else {}), **found})
    print(f"{len(found)} shapes written to {path}; to ship them, copy it to {tuned.SHIPPED}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--compile", action="store_true", help="build the kernels, run nothing")
    parser.add_argument("--check", action="store_true", help="against the reference, and build them")
    parser.add_argument("--tune", action="store_true", help="find the best tile sizes and keep them")
    parser.add_argument("--quick", action="store_true", help="build only the largest of bfloat16")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16", help="what to measure with")
    args = parser.parse_args()
    if args.check:
        if not check():
            sys.exit("a kernel is wrong, or does not fit")
    elif args.compile:
        if not build(the_largest() if args.quick else everything()):
            sys.exit("a kernel spills registers or wants more shared memory than there is")
    elif not torch.cuda.is_available():
        sys.exit("loadtest.kernels: NOTHING MEASURED. It needs a CUDA device, and torch finds none here.")
    elif args.tune:
        keep_tuned(DTYPES[args.dtype])
    else:
        measure(DTYPES[args.dtype])


if __name__ == "__main__":
    main()
