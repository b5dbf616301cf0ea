"""Every Triton kernel against its float64 reference, under triton's interpreter, over shapes that hold every
pair of values of a shape's parameters.

Import this module before any other that imports triton.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from baton.core.sampling_params import ResolvedSampling
from baton.engine.sampling.logits import LogitRules, PackedRules, Row, allowed_words
from baton_kernels.activation import GELU_TANH, SILU, Activation
from baton_kernels.causal_conv import ConvWeights
from baton_kernels.mamba import gated_squares
from baton_kernels.mamba_weights import GatedNorm
from baton_kernels.norm import Norm
from baton_kernels.reference import (
    reference_activated,
    reference_attention,
    reference_expanded_attention,
    reference_experts,
    reference_gated,
    reference_gated_norm,
    reference_latent_attention,
    reference_norm,
    reference_route,
    reference_turned,
    reference_write_kv,
)
from baton_kernels.rotary import HeadNorm, WholeNorm
from baton_kernels.window import ChunkedWindow, Window
from tests.support.covering import Choice, covering
from tests.support.expert_cases import EXPERTS, ROUTES, ExpertCase, RouteCase
from tests.support.expert_cases import TOLERANCE as EXPERTS_TOLERANCE
from tests.support.interpreted import (
    attention,
    blocks,
    causal_conv,
    delta_rule,
    expert_shapes,
    experts,
    latent,
    logits,
    mamba,
    rotary,
    routing,
    rows,
    sampling,
    shapes,
    whole_norm,
)
from tests.support.latent_steps import LAYER, LatentCase, step_of
from tests.support.paged_steps import TOLERANCE, Case, lay_out, sinks_of, spoil_unused
from tests.support.sampling_cases import LEVELS as SAMPLING
from tests.support.sampling_cases import Rows, adjusted
from tests.support.state_steps import (
    DELTAS,
    MAMBAS,
    DeltaCase,
    MambaCase,
    StateStep,
    conv_reference,
    shares,
)

ROW_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
STATE_TOLERANCE = 1e-4
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEADS: Mapping[str, Sequence[object]] = MappingProxyType(
    {
        "head_dim": (64, 96, 128, 256),
        "group": (1, 2, 3, 4, 5, 7, 8, 16),
        "kv_heads": (1, 2, 3),
        "block_size": (16, 32, 64),
        "dtype": DTYPES,
    }
)
ATTENTION: Mapping[str, Sequence[object]] = MappingProxyType(
    {
        **HEADS,
        "lengths": ("ones", "short", "edges of blocks", "one long", "any"),
        "rows": ("decode", "prompts", "both"),
        "queries": (1, 2, 5),
        "window": (None, 1, 17, 64, 1000, 5000, ChunkedWindow(17), ChunkedWindow(1000)),
        "sinks": (False, True),
        "softcap": (None, 0.5, 20.0),
        "processors": (1, 3, 40),
        "arch": (80, 90),
    }
)
ROTARY: Mapping[str, Sequence[object]] = MappingProxyType(
    {**HEADS, "lengths": ("ones", "short", "any"), "offset": (None, 0.0, 1.0), "rows": ("decode", "both")}
)
LATENTS: Mapping[str, Sequence[object]] = MappingProxyType(
    {
        "heads": (1, 5, 16, 40, 128),
        "sizes": ((40, 30), (64, 64), (288, 256), (320, 256), (576, 512)),
        "block_size": (16, 64),
        "dtype": DTYPES,
        "decode": ((), (1, 70, 64), (900, 3)),
        "chunks": ((), ((0, 5), (70, 3)), ((300, 20),)),
        "queries": (1, 3),
        "processors": (1, 3, 40),
    }
)
EXPANDED: Mapping[str, Sequence[object]] = MappingProxyType(
    {
        "heads": (1, 3),
        "dims": ((24, 20), (72, 8), (96, 64), (128, 128), (192, 128), (256, 256)),
        "rows": ((1, 1), (1, 300), (33, 150), (140, 140)),
        "dtype": DTYPES,
        "arch": (80, 90),
    }
)
LINES: Mapping[str, Sequence[object]] = MappingProxyType(
    {"size": (1, 64, 1000, 1024, 4096, 5120), "dtype": DTYPES, "rows": (0, 1, 7), "spread": (0.1, 10.0)}
)
NORMS: Mapping[str, Sequence[object]] = MappingProxyType(
    {
        **LINES,
        "adds": (False, True),
        "post": (None, "rms", "layer"),
        "norm": (None, "rms", "layer", "layer without bias"),
        "offset": (0.0, 1.0),
        "factor": (1.0, 0.22),
    }
)
WHOLE_NORMS: Mapping[str, Sequence[object]] = MappingProxyType(
    {**{name: HEADS[name] for name in ("head_dim", "group", "kv_heads", "dtype")}, "ranks": (1, 2, 3)}
)
ACTIVATIONS: Mapping[str, Sequence[object]] = MappingProxyType(
    {**LINES, "activation": (SILU, GELU_TANH, Activation("clamped_swiglu", 7.0))}
)
BLOCKS: Mapping[str, Sequence[object]] = MappingProxyType(
    {
        "head_dim": (3, 64, 128),
        "block_size": (1, 16, 64),
        "layers": (1, 5),
        "dtype": (*DTYPES, torch.uint8),
        "count": (0, 1, 9),
    }
)
RULES: Mapping[str, Sequence[object]] = MappingProxyType(
    {
        "vocab": (6, 300, 5000),
        "barred": (0, 2, 300),
        "biased": (0, 3, 200),
        "prompt": (1, 700),
        "outputs": (0, 5, 300),
        "repetition": (1.0, 0.5, 1.3),
        "frequency": (0.0, 0.25, -2.0),
        "presence": (0.0, 1.5, -0.5),
    }
)
MASKS: Mapping[str, Sequence[object]] = MappingProxyType(
    {"vocab": (1, 31, 32, 33, 4096, 9001), "rows": (1, 2, 7), "allowed": (0.0, 0.01, 0.5, 1.0)}
)
SHORT_CONVS: Mapping[str, Sequence[object]] = MappingProxyType(
    {
        "channels": (6, 96, 300),
        "units": (1, 3),
        "taps": (1, 2, 3),
        "biased": (False, True),
        "queries": (1, 2),
        "chunks": (([3, 18, 1], [17, 2]), ([40],), ()),
    }
)
GATED_NORMS: Mapping[str, Sequence[object]] = MappingProxyType(
    {
        "size": (1, 27, 512, 600),
        "groups": (1, 3),
        "rows": (0, 1, 5),
        "dtype": DTYPES,
        "weighs": (False, True),
        "gate_first": (False, True),
        "sums": (False, True),
    }
)
VOCABS = (7, 320, 4096, 9001)
ROUNDS = 2
"""The number of passes over the pairs, with other combinations each time."""


class WrongError(Exception):
    """A kernel and its reference differ."""


@dataclass(frozen=True)
class Checked:
    """The checked shapes of one kernel."""

    kernel: str
    cases: int
    worst: float
    """The largest difference, as a share of the tolerance."""
    seconds: float


def check_all(most: int | None = None) -> Iterator[Checked]:
    """Check each kernel on up to ``most`` shapes (None: all). Raises WrongError, which names the kernel and
    the shape."""
    by_kernel: dict[str, tuple[Callable[[Choice, int], float], Mapping[str, Sequence[object]]]] = {
        "attention": (_attention, ATTENTION),
        "latents": (_absorbed, LATENTS),
        "expanded latents": (_expanded, EXPANDED),
        "rotate, store": (_rotary, ROTARY),
        "KV write": (_write_kv, ROTARY),
        "add, norm": (_add_norm, NORMS),
        "norm of all heads": (_whole_norm, WHOLE_NORMS),
        "gated product": (_gated_product, ACTIVATIONS),
        "activation": (_activated, {**LINES, "activation": (SILU, GELU_TANH)}),
        "block copy": (_copy_blocks, BLOCKS),
        "mask": (_bar_tokens, MASKS),
        "rules": (_adjust, RULES),
        "router": (_route, ROUTES),
        "experts": (_multiply, EXPERTS),
        "linear attention": (_linear_attention, DELTAS),
        "Mamba-2": (_mamba, MAMBAS),
        "short convolution": (_short_conv, SHORT_CONVS),
        "gated norm": (_gated_norm, GATED_NORMS),
        "draw": (_draw, {"vocab": VOCABS, "round": (0, 1)}),
    }
    for kernel, (check, levels) in by_kernel.items():
        began = time.monotonic()
        worst, count = 0.0, 0
        choices = [choice for seed in range(ROUNDS) for choice in covering(levels, seed)]
        for seed, choice in enumerate(choices[:most]):
            torch.manual_seed(seed)
            share = check(choice, seed)
            if not share <= 1:
                raise WrongError(f"{kernel} differs by {share:.1f} times what is tolerated: {choice}")
            worst, count = max(worst, share), count + 1
        yield Checked(kernel, count, worst, time.monotonic() - began)


def _linear_attention(choice: Choice, seed: int) -> float:
    case = DeltaCase.of(choice)
    expected = case.expected()
    out = delta_rule.linear_attention(case.layer, case.inputs, case.step.states, case.step.rows)
    [of_out, of_states] = shares((out, case.step.states.pages), expected, STATE_TOLERANCE)
    return max(of_out * STATE_TOLERANCE / max(STATE_TOLERANCE, ROW_TOLERANCE[out.dtype]), of_states)


def _mamba(choice: Choice, seed: int) -> float:
    case = MambaCase.of(choice)
    expected = case.expected()
    out = mamba.mamba(case.projected, case.weights, case.sizes, case.step.states, case.step.rows)
    return max(shares((out, case.step.states.pages), expected, STATE_TOLERANCE))


def _short_conv(choice: Choice, seed: int) -> float:
    channels: Any = choice["channels"]
    units: Any = choice["units"]
    taps: Any = choice["taps"]
    conv = ConvWeights(torch.randn(taps + 1, channels), torch.randn(channels) if choice["biased"] else None)
    step = StateStep.of(units, channels // units * taps, choice["chunks"], choice["queries"])  # type: ignore[arg-type]
    projected = torch.randn(step.length, 3 * channels)
    expected = step.expected(conv_reference(projected, conv, units))
    out = causal_conv.short_conv(projected, conv.weight, conv.bias, step.states, step.rows)
    return max(shares((out, step.states.pages), expected, 1e-5))


def _gated_norm(choice: Choice, seed: int) -> float:
    size: Any = choice["size"]
    groups: Any = choice["groups"]
    rows: Any = choice["rows"]
    dtype: Any = choice["dtype"]
    first = choice["gate_first"] is True
    y, gate, weight = (
        torch.randn(rows, size * groups),
        torch.randn(rows, size * groups),
        torch.randn(size * groups),
    )
    norm = GatedNorm(weight if choice["weighs"] else None, 1e-5, groups, size, first)
    squares = gated_squares(y, gate, norm) if choice["sums"] else None
    out = mamba.gated_norm(y, gate, norm, dtype, squares)
    expected = reference_gated_norm(y, gate, norm.weight, 1e-5, groups, first)
    return _share(out, expected, ROW_TOLERANCE[dtype])


def _share(out: Tensor, expected: Tensor, tolerance: float, relative: bool = True) -> float:
    """Return the largest difference as a share of ``tolerance`` (if ``relative``, times 1 + the expected
    value)."""
    if not out.numel():
        return 0.0
    out, expected = out.double(), expected.double()
    same = out == expected  # covers infinities
    allowed = tolerance * (1 + expected.abs()) if relative else torch.full_like(expected, tolerance)
    shares = torch.where(same, 0.0, (out - expected).abs() / allowed)
    return float(shares.nan_to_num(math.inf).max())


def _case(choice: Choice, seed: int, longest: int = 4000, window: Window | None = None) -> Case:
    rng = random.Random(seed)
    block: Any = choice["block_size"]

    def length(most: int) -> int:
        match choice["lengths"]:
            case "ones":
                return 1
            case "short":
                return rng.randint(1, min(most, 60))
            case "edges of blocks":
                return min(most, rng.randint(1, 6) * int(block) + rng.choice([-1, 0, 1]))
        return rng.randint(1, most)

    decode = [length(longest) for _ in range(rng.randint(1, 5))]
    chunks = [(length(longest - 90) - 1, length(90)) for _ in range(rng.randint(1, 3))]
    if choice["lengths"] == "one long":
        decode = [longest, *(rng.randint(1, 60) for _ in decode)]
        chunks = [(longest - 90, 90), *((rng.randint(0, 60), length(40)) for _ in chunks)]
    kv_heads: Any = choice["kv_heads"]
    group: Any = choice["group"]
    wanted: Any = choice.get("queries", 1)
    queries = min(wanted, 32 // group)  # the rows that one tile holds, whatever the head size
    return Case(
        heads=group * kv_heads,
        kv_heads=kv_heads,
        head_dim=choice["head_dim"],  # type: ignore[arg-type]
        block_size=block,
        window=window,
        decode=() if choice["rows"] == "prompts" else tuple(max(length, queries) for length in decode),
        chunks=() if choice["rows"] == "decode" else tuple(chunks),
        dtype=choice["dtype"],  # type: ignore[arg-type]
        softcap=choice.get("softcap"),  # type: ignore[arg-type]
        queries=queries,
        has_sinks=choice.get("sinks") is True,
    )


def _attention(choice: Choice, seed: int) -> float:
    window: Any = choice["window"]
    case = _case(choice, seed, window=window)
    pool, batch = lay_out(case)
    device = shapes.Device(choice["processors"], choice["arch"])  # type: ignore[arg-type]
    q = torch.randn(batch.positions.numel(), case.heads, case.head_dim).to(case.dtype)
    plan = attention.CudaPlan.build(batch, pool, {window}, case.heads, device)
    how: dict[str, Any] = {"scale": 2 * case.head_dim**-0.5, "window": window, "softcap": case.softcap}
    how["sinks"] = sinks_of(case)
    out = plan.attend(spoil_unused(pool, batch, 1), 1, q, **how)
    expected = reference_attention(pool, 1, q, batch, **how)
    return _share(out, expected, TOLERANCE[case.dtype], relative=False)


def _absorbed(choice: Choice, seed: int) -> float:
    number: Any = {name: choice[name] for name in choice}
    width, value_dim = number["sizes"]
    decode = tuple(max(context, number["queries"]) for context in number["decode"])
    case = LatentCase(
        number["heads"],
        width,
        value_dim,
        number["block_size"],
        decode,
        number["chunks"],
        number["dtype"],
        number["queries"],
    )
    step = step_of(case)
    device = shapes.Device(number["processors"], 90)
    plan = latent.CudaLatentPlan.build(step.batch, step.batch, step.view, case.heads, device)
    how: dict[str, Any] = {"scale": case.scale, "value_dim": value_dim}
    out = plan.attend(step.view, LAYER, step.q, **how)
    expected = reference_latent_attention(step.view, LAYER, step.q, step.batch, **how)
    return _share(out, expected, TOLERANCE[case.dtype])


def _expanded(choice: Choice, seed: int) -> float:
    number: Any = {name: choice[name] for name in choice}
    (length, context), (dim, value_dim), heads = number["rows"], number["dims"], number["heads"]
    dtype = number["dtype"]
    step = step_of(LatentCase(heads, 64, 48, 16, (3,), (), dtype))
    device = shapes.Device(3, number["arch"])
    plan = latent.CudaLatentPlan.build(step.batch, step.batch, step.view, heads, device)
    q, k = (torch.randn(tokens, heads, dim).to(dtype) for tokens in (length, context))
    v = torch.randn(context, heads, 16 + value_dim).to(dtype)[..., 16:]
    out = plan.attend_expanded(q, k, v, scale=dim**-0.5)
    expected = reference_expanded_attention(q, k, v, scale=dim**-0.5)
    return _share(out, expected, TOLERANCE[dtype])


def _rotary(choice: Choice, seed: int) -> float:
    case = _case(choice, seed, longest=200)
    pool, batch = lay_out(case)
    tokens = batch.positions.numel()
    qkv = torch.randn(tokens, case.heads + 2 * case.kv_heads, case.head_dim).to(case.dtype)
    cos, sin = torch.randn(2, tokens, 1, case.head_dim)
    of_q, of_k = torch.randn(2, case.head_dim).to(case.dtype)
    offset: Any = choice["offset"]
    norm = None if offset is None else HeadNorm(of_q, of_k, 1e-5, offset)
    q, k, v = torch.split(qkv, [case.heads, case.kv_heads, case.kv_heads], dim=1)
    expected = pool.double()
    turned_k = reference_turned(k, cos, sin, norm.k if norm else None, 1e-5, offset or 0.0)
    reference_write_kv(expected, 1, turned_k, v.double(), batch)
    out = rotary.rotate_and_store(pool, 1, qkv, cos, sin, norm, batch)
    turned_q = reference_turned(q, cos, sin, norm.q if norm else None, 1e-5, offset or 0.0)
    tolerance = ROW_TOLERANCE[case.dtype]
    return max(_share(out, turned_q, tolerance), _share(pool, expected, tolerance))


def _write_kv(choice: Choice, seed: int) -> float:
    case = _case(choice, seed, longest=200)
    pool, batch = lay_out(case)
    k, v = torch.randn(2, batch.positions.numel(), case.kv_heads, case.head_dim).to(case.dtype)
    expected = pool.clone()
    reference_write_kv(expected, 1, k, v, batch)
    rows.write_kv(pool, 1, k, v, batch)
    return 0.0 if torch.equal(pool, expected) else math.inf


def _lines(choice: Choice, width: int) -> Tensor:
    number: Any = choice["rows"]
    spread: Any = choice["spread"]
    dtype: Any = choice["dtype"]
    lines: Tensor = (spread * torch.randn(number, width)).to(dtype)
    return lines


def norm_of(kind: object, choice: Choice) -> Norm | None:
    """A norm with random weights, of the size, type and offset of the choice."""
    if kind is None:
        return None
    size: Any = choice["size"]
    dtype: Any = choice["dtype"]
    offset: Any = choice["offset"]
    weight, bias = torch.randn(2, size).to(dtype)
    return Norm(weight, 1e-5, offset, centered=kind != "rms", bias=bias if kind == "layer" else None)


def _add_norm(choice: Choice, seed: int) -> float:
    size: Any = choice["size"]
    factor: Any = choice["factor"]
    x = _lines(choice, size)
    residual = torch.randn(x.shape)
    post, norm = (norm_of(choice[name], choice) for name in ("post", "norm"))
    added = residual.double()
    if choice["adds"]:
        added = added + reference_norm(x, post) * factor
    out = rows.add_norm(x if choice["adds"] else None, residual, norm, x.dtype, post=post, factor=factor)
    share = _share(out, reference_norm(added, norm), ROW_TOLERANCE[x.dtype])
    return max(share, _share(residual, added, 1e-5))


def _whole_norm(choice: Choice, seed: int) -> float:
    head_dim: Any = choice["head_dim"]
    kv_heads: Any = choice["kv_heads"]
    heads: Any = choice["group"] * kv_heads
    ranks: Any = choice["ranks"]
    dtype: Any = choice["dtype"]
    sizes = [head_dim * part for part in (heads, kv_heads, kv_heads)]
    qkv = torch.randn(ranks, 3, sum(sizes)).to(dtype)
    q, k = (torch.randn(ranks, size).to(dtype) for size in sizes[:2])
    expected = [*torch.split(qkv.double(), sizes, dim=-1)]
    for at, weight in enumerate((q, k)):
        whole = Norm(weight.flatten(), 1e-5)
        together = reference_norm(expected[at].transpose(0, 1).flatten(1), whole)
        expected[at] = together.view(3, *weight.shape).transpose(0, 1)
    norms = [WholeNorm(*weights, 1e-5) for weights in zip(q, k, strict=True)]
    if ranks == 1:
        whole_norm.norm_heads(qkv[0], norms[0])
    else:
        held = list(zip(qkv, norms, strict=True))
        sums = torch.stack([whole_norm.squares_of_heads(*of_rank) for of_rank in held]).sum(0)
        for part, norm in held:
            whole_norm.scale_heads(part, sums, norm, (q.numel(), k.numel()))
    return _share(qkv, torch.cat(expected, dim=-1), ROW_TOLERANCE[dtype])


def _gated_product(choice: Choice, seed: int) -> float:
    size: Any = choice["size"]
    activation: Any = choice["activation"]
    gate_up = _lines(choice, 2 * size)
    expected = reference_gated(gate_up[:, :size], gate_up[:, size:], activation)
    with np.errstate(over="ignore"):
        out = rows.gated_product(gate_up, activation)
    return _share(out, expected, ROW_TOLERANCE[gate_up.dtype])


def _activated(choice: Choice, seed: int) -> float:
    size: Any = choice["size"]
    activation: Any = choice["activation"]
    x = _lines(choice, size)
    with np.errstate(over="ignore"):
        out = rows.activated(x, activation)
    return _share(out, reference_activated(x, activation), ROW_TOLERANCE[x.dtype])


def _copy_blocks(choice: Choice, seed: int) -> float:
    shape: Any = (2, choice["layers"], 2, choice["block_size"], choice["head_dim"])
    dtype: Any = choice["dtype"]
    count: Any = choice["count"]
    pool, slots = torch.randint(0, 255, (2, 12, *shape)).to(dtype)
    targets, sources = torch.randperm(12)[:count], torch.randperm(12)[:count]
    expected = pool.clone()
    expected[targets] = slots[sources]
    blocks.copy_blocks(pool, targets, slots, sources)
    return 0.0 if torch.equal(pool, expected) else math.inf


def _bar_tokens(choice: Choice, seed: int) -> float:
    rng = np.random.default_rng(seed)
    vocab: Any = choice["vocab"]
    number: Any = choice["rows"]
    out = torch.randn(7, vocab)
    expected = out.clone()
    chosen = torch.randperm(7)[:number]
    masks = [np.flatnonzero(rng.random(vocab) < choice["allowed"]) for _ in chosen]
    for row, ids in zip(chosen.tolist(), masks, strict=True):
        expected[row, np.setdiff1d(np.arange(vocab), ids)] = -math.inf
    words = np.stack([allowed_words(ids, vocab) for ids in masks])
    logits.bar_tokens(out, chosen, torch.from_numpy(words))
    return 0.0 if torch.equal(out, expected) else math.inf


def _adjust(choice: Choice, seed: int) -> float:
    rng = random.Random(seed)
    number: Any = {name: choice[name] for name in choice}
    vocab = number["vocab"]
    biased = rng.sample(range(vocab), min(vocab, number["biased"]))
    params = ResolvedSampling(
        max_tokens=1,
        bad_word_ids=tuple((rng.randrange(vocab),) for _ in range(number["barred"])),
        logit_bias=tuple((token, rng.uniform(-100, 100)) for token in biased),
        repetition_penalty=number["repetition"],
        presence_penalty=number["presence"],
        frequency_penalty=number["frequency"],
    )
    prompt, outputs = ([rng.randrange(vocab) for _ in range(number[part])] for part in ("prompt", "outputs"))
    out = 5 * torch.randn(3, vocab)
    expected = out.double()
    expected[1] = adjusted(out[1], params, prompt, outputs)
    rules = LogitRules(params, prompt, frozenset({0}))
    logits.adjust(out, *PackedRules.of([Row(1, rules, prompt + outputs)], out.device))
    return _share(out, expected, 1e-5)


def _route(choice: Choice, seed: int) -> float:
    case = RouteCase.of(choice)
    chosen, weights = routing.route(case.logits, case.routing, case.bias)
    expected, exact = reference_route(case.logits, case.routing, case.bias)
    return _share(weights, exact, 1e-6) if chosen.tolist() == expected else math.inf


def _multiply(choice: Choice, seed: int) -> float:
    case = ExpertCase.of(choice)
    arch: Any = choice["arch"]
    shape = expert_shapes.ExpertShape.of(case.tensors, shapes.Device(132, arch))
    step = (case.x, case.experts, case.weights, case.tensors, case.weighs_input)
    tolerance = EXPERTS_TOLERANCE[case.x.dtype]
    return _share(experts.multiply(*step, shape), reference_experts(*step), tolerance)


def _draw(choice: Choice, seed: int) -> float:
    vocab: Any = choice["vocab"]
    drawn = Rows.of(covering(SAMPLING, seed), vocab, seed)
    tokens = sampling.draw(drawn.logits.clone(), *drawn.packed).tolist()
    expected = drawn.expected()
    sure = [at for at, token in enumerate(expected) if token is not None]
    agree = [tokens[at] for at in sure] == [expected[at] for at in sure]
    return 0.0 if agree and len(sure) > 0.7 * len(tokens) else math.inf
