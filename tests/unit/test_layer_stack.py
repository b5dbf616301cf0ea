"""All layers in one call of the CPU's kernels: the same numbers as layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.models.decoder import Decoder
from baton.models.loader import load_model
from baton.models.quantization.registry import Quantization
from baton_kernels.activation import GELU_TANH, SILU, Activation
from baton_kernels.cpu.attention import CpuPlan
from baton_kernels.cpu.layers import LayerStack, LayerWeights, MixtureWeights
from baton_kernels.cpu.linear import PackedWeight
from baton_kernels.int8 import quantize
from baton_kernels.norm import Norm
from baton_kernels.rotary import HeadNorm, WholeNorm
from baton_kernels.rows import add_norm, scale_heads, squares_of_heads
from baton_kernels.window import ChunkedWindow
from tests.support.covering import Choice, covering
from tests.support.exact import alike, assert_same, exact_logits
from tests.support.model_ring import Ring, prompt
from tests.support.paged_steps import Case, lay_out
from tests.support.threads import in_threads
from tests.support.tiny_models import ModelDir

pytestmark = pytest.mark.deep

CLAMPED = Activation("clamped_swiglu", number=1.0)
Rotation = tuple[Tensor, Tensor]
NAMES = ("llama", "llama-biased-mqa", "llama-dynamic", "qwen2-window", "qwen3", "qwen3-biased-window")


def model_of(model_dir: ModelDir, name: str, dtype: str, quantization: Quantization) -> Decoder:
    model = load_model(model_dir(name), dtype=dtype, quantization=quantization)
    assert isinstance(model, Decoder)
    return model


def answers(model: Decoder) -> list[Tensor]:
    """The logits of steps of every make, and the pool that they leave."""
    ring = Ring(model, num_blocks=160)
    a, b, c = prompt(75, seed=1), prompt(103, seed=2), prompt(600, seed=3)
    steps = [
        ring.step(chunks=[("a", a[:7]), ("b", b[:40])]),
        ring.step(chunks=[("b", b[40:41]), ("a", a[7:50])]),
        ring.step([("a", a[50])], [("b", b[41:80]), ("c", c[:590])]),
        ring.step([("b", b[80]), ("a", a[51]), ("c", c[590])]),  # one of them in two shares
        ring.step([("a", a[52])]),
    ]
    wanted = ring.step_wanted([("a", a[53:60]), ("b", b[81:90])], ["b"])
    return [*(logits for step in steps for logits in step.values()), *wanted, ring.pool]


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_is_what_its_layers_are(
    name: str, dtype: str, quantization: Quantization, model_dir: ModelDir
) -> None:
    model = model_of(model_dir, name, dtype, quantization)
    assert model.stack is not None
    stacked = answers(model)
    model.stack = None
    for ours, one_by_one in zip(stacked, answers(model), strict=True):
        assert torch.equal(ours, one_by_one)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "qwen3-biased-window"])
def test_threads_change_nothing(name: str, dtype: str, model_dir: ModelDir) -> None:
    """But the order of the sums of a prompt's attention, which comes in runs if there are few heads."""
    model = model_of(model_dir, name, dtype, "none")
    alone, exact = answers(model), exact_logits(model_dir(name), prompt(600, seed=3))
    for threads in (2, 3, 5):
        with in_threads(threads):
            together = answers(model)
        for ours, expected in zip(together, alone, strict=True):
            if dtype == "float32":
                assert_same(ours, alike(expected, exact))
            else:
                assert (ours - expected).norm() <= 1e-2 * expected.norm()


MIXTURES = ("mixtral", "gpt-oss", "glm4-moe", "hy-v3", "qwen2-moe")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_are_what_their_layers_are(name: str, dtype: str, model_dir: ModelDir) -> None:
    model = model_of(model_dir, name, dtype, "none")
    assert model.stack is not None
    stacked = answers(model)
    model.stack = None
    gated = model.config.experts is not None and model.config.experts.shared_gate
    for ours, one_by_one in zip(stacked, answers(model), strict=True):
        if gated:  # the sigmoid of the shared expert's gate is torch's or the kernels'
            assert (ours - one_by_one).norm() <= (1e-5 if dtype == "float32" else 1e-2) * one_by_one.norm()
        else:
            assert torch.equal(ours, one_by_one)


def test_is_used(model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch) -> None:
    model, counts = model_of(model_dir, "llama", "float32", "none"), list[int]()
    run = LayerStack.run

    def counted(stack: LayerStack, count: int, *rest: Tensor) -> Tensor:
        counts.append(count)
        return run(stack, count, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(LayerStack, "run", counted)
    ring = Ring(model)
    ring.step(chunks=[("a", prompt(5))])
    ring.step_wanted([("b", prompt(5))], ["b"])
    layers = model.config.num_layers
    assert counts == [layers, layers - 1], "the last layer goes its own way where few rows are wanted"


LEVELS: Mapping[str, Sequence[object]] = MappingProxyType(
    {
        "norms": ("rms", "layer", None),
        "posts": ("rms", "layer", None),
        "offset": (0.0, 1.0),
        "factor": (1.0, 0.25),
        "heads": (None, "each", "whole"),
        "window": (None, 20, ChunkedWindow(16)),
        "softcap": (None, 5.0),
        "has_sinks": (False, True),
        "rope": (0, 1),
        "mlp": ((SILU, True), (GELU_TANH, True), (CLAMPED, True), (SILU, False), (GELU_TANH, False)),
        "quantized": (False, True),
    }
)
HIDDEN, INNER, CASE = 48, 40, Case(4, 2, 32, 16, None, (5, 40), ((0, 20), (33, 7)))


def any_layer(choice: Choice, dtype: torch.dtype) -> LayerWeights:
    """Random weights of a layer of the kind that ``choice`` says."""
    offset: Any = choice["offset"]
    mlp: Any = choice["mlp"]
    activation, gated = mlp
    rest: Any = {name: choice[name] for name in ("window", "softcap", "factor", "rope")}

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape).to(dtype)

    def norm(kind: object) -> Norm | None:
        centered = kind == "layer"
        bias = numbers(HIDDEN) if centered else None
        return None if kind is None else Norm(numbers(HIDDEN), 1e-5, offset, centered, bias)

    def packed(outputs: int, inputs: int, **how: Any) -> PackedWeight:
        weight = numbers(outputs, inputs) * inputs**-0.5
        source = quantize(weight) if choice["quantized"] else weight
        made = PackedWeight.of(source, numbers(outputs), dtype=dtype, **how)
        assert made is not None, "this machine has no compiler, which the README asks for"
        return made

    heads, kv_heads, dim = CASE.heads, CASE.kv_heads, CASE.head_dim
    of_heads: Mapping[object, HeadNorm | WholeNorm | None] = {
        None: None,
        "each": HeadNorm(numbers(dim), numbers(dim), 1e-5, offset),
        "whole": WholeNorm(numbers(heads * dim), numbers(kv_heads * dim), 1e-5, offset),
    }
    return LayerWeights(
        norm(choice["norms"]),
        norm(choice["norms"]),
        packed((heads + 2 * kv_heads) * dim, HIDDEN),
        packed(HIDDEN, heads * dim),
        (
            packed(2 * INNER if gated else INNER, HIDDEN, gated=gated, activation=activation),
            packed(HIDDEN, INNER),
        ),
        attention_post=norm(choice["posts"]),
        mlp_post=norm(choice["posts"]),
        head_norm=of_heads[choice["heads"]],
        sinks=torch.randn(heads) if choice["has_sinks"] else None,
        **rest,
    )


def one_by_one(
    layers: Sequence[LayerWeights], x: Tensor, pool: Tensor, plan: CpuPlan, rotations: Sequence[Rotation]
) -> Tensor:
    """The layers, by a call of each of their kernels."""
    delta, before = None, layers[0]
    for index, layer in enumerate(layers):
        dtype, norm = layer.qkv.dtype, layer.head_norm
        normed = add_norm(delta, x, layer.input_norm, dtype, post=before.mlp_post, factor=before.factor)
        qkv = layer.qkv.multiply(normed)
        if isinstance(norm, WholeNorm):
            sizes = norm.q.numel(), norm.k.numel()
            scale_heads(qkv, squares_of_heads(qkv, norm), norm, sizes)
            norm = None
        cos, sin = rotations[layer.rope]
        heads = qkv.view(len(x), -1, CASE.head_dim)
        q = plan.rotate_and_store(pool, index, heads, cos=cos, sin=sin, norm=norm)
        attended = plan.attend(
            pool, index, q, scale=0.2, window=layer.window, softcap=layer.softcap, sinks=layer.sinks
        )
        added = layer.o.multiply(attended.flatten(1))
        normed = add_norm(added, x, layer.mlp_norm, dtype, post=layer.attention_post, factor=layer.factor)
        delta, before = _mlp(layer, normed), layer
    assert delta is not None
    return delta


def _mlp(layer: LayerWeights, x: Tensor) -> Tensor:
    assert not isinstance(layer.mlp, MixtureWeights)
    gate_up, down = layer.mlp
    return down.multiply(gate_up.multiply(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("choice", covering(LEVELS))
def test_layers_of_every_kind(choice: Choice, dtype: torch.dtype) -> None:
    """A layer of some kind between two others, which are plain or of a kind of their own."""
    torch.manual_seed(0)
    plain = {name: levels[0] for name, levels in LEVELS.items()}
    other = {name: levels[-1] for name, levels in LEVELS.items()}
    layers = [any_layer(kind, dtype) for kind in (plain, choice, other)]
    pool, batch = lay_out(replace(CASE, dtype=dtype))
    plan = CpuPlan.build(batch, pool)
    assert plan is not None
    tokens = batch.positions.numel()
    cos, sin = torch.randn(2, 2, tokens, 1, CASE.head_dim)
    rotations = list(zip(cos, sin, strict=True))
    x, expected_pool = torch.randn(tokens, HIDDEN), pool.clone()
    expected_x = x.clone()
    expected = one_by_one(layers, expected_x, expected_pool, plan, rotations)
    stack = LayerStack(layers, heads=CASE.heads, scale=0.2)
    assert torch.equal(stack.run(3, x, [pool], [plan], rotations), expected)
    assert torch.equal(x, expected_x)
    assert torch.equal(pool, expected_pool)
    with pytest.raises(ValueError, match="rotations are 1; the layers use 2"):
        stack.run(3, x, [pool], [plan], rotations[:1])


def test_weights_that_would_be_misread() -> None:
    kind = {name: levels[0] for name, levels in LEVELS.items()}
    layer = any_layer({**kind, "heads": "each"}, torch.bfloat16)
    assert isinstance(layer.head_norm, HeadNorm)
    wrong_norm = Norm(torch.ones(HIDDEN), 1e-5)
    wrong = (
        replace(layer, input_norm=wrong_norm),
        replace(layer, mlp_post=wrong_norm),
        replace(layer, head_norm=replace(layer.head_norm, k=torch.ones(CASE.head_dim))),
        replace(layer, sinks=torch.ones(CASE.heads + 1)),
        replace(layer, sinks=torch.ones(2 * CASE.heads)[::2]),
    )
    for each in wrong:
        with pytest.raises(ValueError, match=r"norm's weights are of another type|sinks are"):
            LayerStack([layer, each], heads=CASE.heads, scale=0.2)
