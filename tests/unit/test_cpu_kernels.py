"""The CPU's kernels against float64: matmul with packed weights, activations, norms, rotation; and how they
are built."""

from __future__ import annotations

import math
import os
import platform
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton_kernels import row_scales, rows
from baton_kernels.activation import GELU_TANH, SILU, Activation, activated
from baton_kernels.activation_kind import GATED, RELU2
from baton_kernels.cpu import build, library
from baton_kernels.cpu import rows as cpu_rows
from baton_kernels.cpu.attention import CpuPlan
from baton_kernels.cpu.linear import PackedWeight
from baton_kernels.int8 import quantize
from baton_kernels.norm import Norm
from baton_kernels.plain import PlainPlan
from baton_kernels.quantized import QuantizedWeight
from baton_kernels.reference import reference_turned, reference_write_kv
from baton_kernels.rotary import HeadNorm, WholeNorm
from baton_kernels.window import ChunkedWindow, Window
from tests.support.covering import Choice, covering
from tests.support.paged_steps import Case, lay_out
from tests.support.threads import in_threads
from tests.support.threads import threads as all_threads

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
TYPES = list(TOLERANCE)


def packed(weight: Tensor, bias: Tensor | None, *, gated: bool = False) -> PackedWeight:
    made = PackedWeight.of(weight, bias, gated=gated, activation=SILU if gated else None)
    assert made is not None, "this machine has no compiler, which the README asks for"
    return made


def packed_int8(
    weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype, *, gated: bool = False
) -> PackedWeight:
    made = PackedWeight.of(weight, bias, gated=gated, dtype=dtype, activation=SILU if gated else None)
    assert made is not None
    return made


def exactly(weight: QuantizedWeight) -> Tensor:
    """What int8 stand for, in float64."""
    return weight.codes.double() * weight.scales.double()


def close(out: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Within the tolerance of the largest value: sums of many products round as their largest parts do."""
    assert (out.double() - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 8, 13, 64, 200])
@pytest.mark.parametrize("outputs", [1, 63, 64, 200])
def test_matmul(rows: int, outputs: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows * outputs)
    x, weight = torch.randn(rows, 48).to(dtype), torch.randn(outputs, 48).to(dtype)
    bias = torch.randn(outputs).to(dtype) if rows % 2 else None
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    out = packed(weight, bias).multiply(x)
    assert out.dtype == dtype
    close(out, expected, dtype)
    close(packed(weight, bias).multiply(x, torch.float32), expected, torch.float32)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [1, 31, 32, 100])
def test_gated_matmul(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    x, weight = torch.randn(9, 40).to(dtype), torch.randn(2 * size, 40).to(dtype)
    bias = torch.randn(2 * size).to(dtype)
    gate, up = (x.double() @ weight.double().T + bias.double()).chunk(2, dim=-1)
    out = packed(weight, bias, gated=True).multiply(x)
    close(out, torch.nn.functional.silu(gate) * up, dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("quantized", [False, True])
def test_a_row_does_not_depend_on_its_neighbours(dtype: torch.dtype, quantized: bool) -> None:
    torch.manual_seed(0)
    x, plain = torch.randn(37, 600).to(dtype), torch.randn(130, 600).to(dtype)
    weight = packed_int8(quantize(plain), None, dtype) if quantized else packed(plain, None)
    together = weight.multiply(x)
    for count in (1, 2, 5, 9):
        for row in range(37 - count + 1):
            assert torch.equal(weight.multiply(x[row : row + count])[0], together[row])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 13, 64, 400])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 48), (63, 130), (64, 2), (200, 600)])
def test_int8_matmul(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    """Against float64 with what the int8 stand for: 600 inputs are several slices, 400 rows several runs."""
    torch.manual_seed(rows * outputs)
    x, weight = torch.randn(rows, inputs).to(dtype), quantize(torch.randn(outputs, inputs))
    bias = torch.randn(outputs).to(dtype) if rows % 2 else None
    expected = x.double() @ exactly(weight).T + (0 if bias is None else bias.double())
    ours = packed_int8(weight, bias, dtype)
    assert ours.multiply(x).dtype == dtype
    close(ours.multiply(x), expected, dtype)
    close(ours.multiply(x, torch.float32), expected, torch.float32)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [1, 31, 32, 100])
@pytest.mark.parametrize("rows", [3, 9])
def test_gated_int8_matmul(size: int, rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    x, weight = torch.randn(rows, 40).to(dtype), quantize(torch.randn(2 * size, 40))
    bias = torch.randn(2 * size).to(dtype)
    gate, up = (x.double() @ exactly(weight).T + bias.double()).chunk(2, dim=-1)
    out = packed_int8(weight, bias, dtype, gated=True).multiply(x)
    close(out, torch.nn.functional.silu(gate) * up, dtype)


CLAMPED, SCALED = Activation("clamped_swiglu", number=1.5), Activation("scaled_silu", number=0.6)
PLAIN_KINDS, GATED_KINDS = (SILU, GELU_TANH, RELU2), (SILU, GELU_TANH, RELU2, CLAMPED, SCALED)


def exactly_activated(x: Tensor, activation: Activation, up: Tensor | None = None) -> Tensor:
    """An activation of float64, gated by ``up`` (None: not)."""
    match activation.kind:
        case "silu":
            x = x / (1 + torch.exp(-x))
        case "gelu_tanh":
            x = x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        case "clamped_swiglu":
            assert up is not None
            limit = torch.tensor(activation.number).double()
            x, up = torch.minimum(x, limit), torch.maximum(torch.minimum(up, limit), -limit) + 1
            x = x / (1 + torch.exp(-1.702 * x))
        case "scaled_silu":
            x = activation.number * x / (1 + torch.exp(-activation.number * x))
        case "relu2":
            x = torch.relu(x) ** 2
    return x if up is None else x * up


@pytest.mark.parametrize(
    "choice",
    covering(
        {
            "dtype": TYPES,
            "quantized": (False, True),
            "kind": tuple(
                (kind, gated)
                for gated, kinds in ((True, GATED_KINDS), (False, PLAIN_KINDS))
                for kind in kinds
            ),
            "size": (1, 31, 100),
            "rows": (1, 20),
            "biased": (False, True),
        }
    ),
)
def test_matmul_with_an_activation(choice: Choice) -> None:
    torch.manual_seed(0)
    size: Any = choice["size"]
    rows: Any = choice["rows"]
    dtype: Any = choice["dtype"]
    kind: Any = choice["kind"]
    activation, gated = kind
    outputs = 2 * size if gated else size
    x, weight = torch.randn(rows, 40).to(dtype), torch.randn(outputs, 40).to(dtype)
    bias = torch.randn(outputs).to(dtype) if choice["biased"] else None
    source = quantize(weight) if choice["quantized"] else weight
    exact = exactly(source) if isinstance(source, QuantizedWeight) else source.double()
    product = x.double() @ exact.T + (0 if bias is None else bias.double())
    halves = product.chunk(2, dim=-1) if gated else (product, None)
    made = PackedWeight.of(source, bias, gated=gated, dtype=dtype, activation=activation)
    assert made is not None
    close(made.multiply(x), exactly_activated(halves[0], activation, halves[1]), dtype)


@pytest.mark.parametrize("activation", GATED_KINDS, ids=lambda a: a.kind)
def test_activations_of_large_and_small_numbers(activation: Activation) -> None:
    """The choice by the kernels, and by plain torch."""
    gate = torch.cat([sign * torch.logspace(-6, 4, 41) for sign in (-1, 1)])
    up = torch.linspace(-3, 3, len(gate))
    expected = exactly_activated(gate.double(), activation, up.double())
    torch.testing.assert_close(
        rows.gated_product(torch.cat((gate, up))[None], activation)[0].double(), expected
    )
    identity = torch.zeros(2 * len(gate), 2)
    identity[: len(gate), 0], identity[len(gate) :, 0] = gate, up
    made = PackedWeight.of(identity, gated=True, activation=activation)
    assert made is not None
    by_kernel = made.multiply(torch.tensor([[1.0, 0.0]]))[0].double()
    torch.testing.assert_close(by_kernel, expected, rtol=2e-6, atol=1e-7)
    if activation.kind not in GATED:
        torch.testing.assert_close(
            activated(gate, activation).double(), exactly_activated(gate.double(), activation)
        )


@pytest.mark.parametrize(("gated", "activation"), [(True, None), (False, CLAMPED)])
def test_activations_that_need_a_gate(gated: bool, activation: Activation | None) -> None:
    with pytest.raises(ValueError, match=f"activation is .*; allowed with gated={gated}: .*silu, gelu_tanh"):
        PackedWeight.of(torch.randn(8, 16), gated=gated, activation=activation)


@pytest.mark.parametrize("dtype", [*TYPES, torch.float16])
def test_each_row_is_rounded_to_the_steps_of_its_own_scale(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(70, 33) * torch.logspace(-3, 3, 70)[:, None]).to(dtype)
    weight[5] = 0
    rounded = quantize(weight)
    values, scales = rounded.codes, rounded.scales[:, 0]
    assert (values.dtype, scales.dtype) == (torch.int8, torch.float32)
    largest = weight.float().abs().amax(1)
    assert torch.equal(values.int().abs().amax(1), torch.where(largest > 0, 127, 0).int())
    off = (exactly(rounded) - weight.double()).abs()
    assert (off <= 0.5001 * scales.double()[:, None]).all()
    torch.testing.assert_close(scales[largest > 0] * 127, largest[largest > 0])
    assert not exactly(rounded)[5].any()


def test_large_weights_are_rounded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(50, 16)
    whole = quantize(weight)
    monkeypatch.setattr(row_scales, "AT_ONCE", 100)
    parts = quantize(weight)
    assert torch.equal(parts.codes, whole.codes)
    assert torch.equal(parts.scales, whole.scales)


@pytest.mark.parametrize("gated", [False, True])
def test_int8_takes_half_of_the_memory(gated: bool) -> None:
    weight = torch.randn(256, 512).bfloat16()
    ours = packed_int8(quantize(weight), None, torch.bfloat16, gated=gated)
    assert packed(weight, None, gated=gated).nbytes == 256 * 512 * 2
    assert ours.nbytes == 256 * 512 + 256 * 4


def test_matmul_refuses_what_it_would_misread() -> None:
    weight = packed(torch.randn(8, 16), None)
    for x in (torch.randn(2, 15), torch.randn(2, 16).bfloat16(), torch.randn(1, 2, 16)):
        with pytest.raises(ValueError, match=r"rows of 16 torch\.float32 are allowed"):
            weight.multiply(x)


def test_matmul_takes_strided_rows() -> None:
    x, weight = torch.randn(4, 3, 16)[:, 1], torch.randn(8, 16)
    close(packed(weight, None).multiply(x), x.double() @ weight.double().T, torch.float32)


def test_matmul_of_no_rows() -> None:
    assert packed(torch.randn(8, 16), None).multiply(torch.empty(0, 16)).shape == (0, 8)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", [1, 13, 200])
def test_matmul_in_several_threads(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, 48).to(dtype), torch.randn(330, 48).to(dtype)
    alone = packed(weight, None).multiply(x)
    with in_threads(3):
        assert torch.equal(packed(weight, None).multiply(x), alone)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("window", [None, 700, ChunkedWindow(700)])
def test_attention_in_several_threads(window: Window | None, dtype: torch.dtype) -> None:
    """Rows that decode are the same in all; those of a prompt up to the order of their sums."""
    torch.manual_seed(0)
    pool, batch = lay_out(Case(6, 2, 64, 16, window, (5, 1300, 512), ((0, 20), (900, 150)), dtype))
    q, sinks = torch.randn(batch.positions.numel(), 6, 64).to(dtype), torch.randn(6)

    def attend(threads: int) -> Tensor:
        with in_threads(threads):
            plan = CpuPlan.build(batch, pool)
            assert plan is not None
            return plan.attend(pool, 1, q, scale=0.125, window=window, softcap=None, sinks=sinks)

    alone = attend(1)
    for threads in (2, 3, 5):
        together = attend(threads)
        assert torch.equal(together[: batch.num_decode], alone[: batch.num_decode])
        close(together, alone.double(), dtype)


def test_released_threads_end() -> None:
    weight = packed(torch.randn(640, 16), None)

    with in_threads(3):
        library.release_threads()
        before = len(all_threads())
        expected = weight.multiply(torch.ones(8, 16))
        assert len(all_threads()) == before + 2
        library.release_threads()
        deadline = time.monotonic() + 60
        while len(all_threads()) > before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(all_threads()) == before
        assert torch.equal(weight.multiply(torch.ones(8, 16)), expected), "others are started"
        library.release_threads()


def test_threads_are_bound_to_a_core_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """If they are as many as the cores; here on a thread of its own, which ends with its threads."""
    cores = sorted(os.sched_getaffinity(0))

    def bound_in(threads: int, allowed: list[int]) -> tuple[bool, list[set[int]]]:
        found: list[tuple[bool, list[set[int]]]] = []

        def compute() -> None:
            before = all_threads()
            monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(allowed))
            with in_threads(threads):
                done = library.bind_threads()
                packed(torch.randn(640, 16), None).multiply(torch.ones(8, 16))
            monkeypatch.undo()
            own = sorted({threading.get_native_id(), *(all_threads() - before)})
            found.append((done, [os.sched_getaffinity(thread) for thread in own]))
            library.release_threads()

        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()
        return found[0]

    everywhere = set(cores)
    if len(cores) < 2:
        pytest.skip("there is one core, so there is nothing to choose")
    done, where = bound_in(2, [cores[0], cores[-1]])
    assert done
    assert sorted(where, key=min) == [{cores[0]}, {cores[-1]}]
    assert bound_in(2, [0, 1, 2]) == (False, [everywhere, everywhere])
    assert bound_in(1, [0]) == (False, [everywhere]), "one alone may go where there is room"
    assert os.sched_getaffinity(0) == everywhere


def test_what_is_left_to_plain_torch() -> None:
    assert PackedWeight.of(torch.randn(8, 16).half()) is None
    assert PackedWeight.of(torch.randn(8, 15)) is None
    assert PackedWeight.of(quantize(torch.randn(8, 16)), dtype=torch.float16) is None
    assert PackedWeight.of(quantize(torch.randn(8, 15)), dtype=torch.float32) is None


def by(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let operations on rows be computed by the CPU's kernels (which must take them), or by plain torch."""
    if kernels == "plain":
        monkeypatch.setattr(cpu_rows, "native", lambda: None)
        return
    for name in ("add_norm", "squares_of_heads", "scale_heads"):
        function = getattr(cpu_rows, name)

        def taken(*args: object, function: Callable[..., object] = function) -> object:
            result = function(*args)
            assert result is not None and result is not False
            return result

        monkeypatch.setattr(cpu_rows, name, taken)


def norm_of(kind: object, size: int, dtype: torch.dtype, offset: float) -> Norm | None:
    weight, bias = torch.rand(size).to(dtype), torch.randn(size).to(dtype)
    match kind:
        case "rms":
            return Norm(weight, 1e-5, offset)
        case "layer":
            return Norm(weight, 1e-5, offset, centered=True)
        case "layer, biased":
            return Norm(weight, 1e-5, offset, centered=True, bias=bias)
    return None


def exactly_normed(x: Tensor, norm: Norm | None) -> Tensor:
    if norm is None:
        return x
    if norm.centered:
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * (norm.weight.double() + norm.offset)
    return x if norm.bias is None else x + norm.bias.double()


NORMS = (None, "rms", "layer", "layer, biased")


@pytest.mark.parametrize("kernels", ["native", "plain"])
@pytest.mark.parametrize(
    "choice",
    covering(
        {
            "types": (("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16")),
            "size": (16, 100, 896),
            "rows": (1, 20),
            "norm": NORMS,
            "post": NORMS,
            "offset": (0.0, 1.0),
            "factor": (1.0, 0.22),
        }
    ),
)
def test_add_norm(choice: Choice, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into numbers far from 0, whose mean a layer norm subtracts."""
    by(kernels, monkeypatch)
    torch.manual_seed(0)
    size: Any = choice["size"]
    count: Any = choice["rows"]
    factor: Any = choice["factor"]
    offset: Any = choice["offset"]
    names: Any = choice["types"]
    x_dtype, dtype = (getattr(torch, name) for name in names)
    x, residual = (3 + torch.randn(count, size)).to(x_dtype), 3 + torch.randn(count, size)
    norm, post = (norm_of(choice[name], size, dtype, offset) for name in ("norm", "post"))
    total = residual.double() + factor * exactly_normed(x.double(), post)
    kept = residual.clone()
    out = rows.add_norm(x, kept, norm, dtype, post=post, factor=factor)
    assert out.dtype == dtype
    close(out, exactly_normed(total, norm), dtype)
    close(kept, total, torch.float32)
    before = kept.clone()
    again = rows.add_norm(None, kept, norm, dtype, post=post, factor=factor)
    assert torch.equal(kept, before), "without x the residual stays"
    close(again, exactly_normed(kept.double(), norm), dtype)
    assert again.data_ptr() != kept.data_ptr(), "the residual changes later"


@pytest.mark.parametrize("kernels", ["native", "plain"])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("ranks", [1, 2])
def test_norm_over_whole_heads(
    ranks: int, offset: float, dtype: torch.dtype, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank has its part of the heads, and the sums of all."""
    by(kernels, monkeypatch)
    torch.manual_seed(0)
    sizes = (96 * ranks, 36 * ranks)
    q, k, v = (torch.randn(20, size).to(dtype) for size in (*sizes, 36 * ranks))
    weights = [torch.rand(size).to(dtype) for size in sizes]
    expected = [
        exactly_normed(part.double(), Norm(weight, 1e-5, offset))
        for part, weight in zip((q, k), weights, strict=True)
    ]
    of_ranks = [
        torch.cat(parts, dim=-1) for parts in zip(*(x.chunk(ranks, -1) for x in (q, k, v)), strict=True)
    ]
    norms = [
        WholeNorm(of_q, of_k, 1e-5, offset)
        for of_q, of_k in zip(*(weight.chunk(ranks) for weight in weights), strict=True)
    ]
    squares = [rows.squares_of_heads(qkv, norm) for qkv, norm in zip(of_ranks, norms, strict=True)]
    together = torch.stack(squares).sum(0)
    for rank, (qkv, norm) in enumerate(zip(of_ranks, norms, strict=True)):
        rows.scale_heads(qkv, together, norm, sizes)
        parts = [*(x.chunk(ranks, -1)[rank] for x in expected), v.chunk(ranks, -1)[rank].double()]
        for ours, exact in zip(torch.split(qkv, [96, 36, 36], dim=-1), parts, strict=True):
            close(ours, exact, dtype)


@pytest.mark.parametrize("planner", ["native", "plain"])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("offset", [None, 0.0, 1.0])
@pytest.mark.parametrize("dim", [64, 96])
def test_rotate_and_store(dim: int, offset: float | None, dtype: torch.dtype, planner: str) -> None:
    """Against float64, without a norm and with norms whose weights have an offset."""
    torch.manual_seed(0)
    pool, batch = lay_out(Case(6, 2, dim, 16, None, (5, 40), ((0, 20),), dtype))
    tokens = batch.positions.numel()
    qkv, (cos, sin) = torch.randn(tokens, 10, dim).to(dtype), torch.randn(2, tokens, 1, dim)
    of_q, of_k = torch.rand(2, dim).to(dtype)
    norm = None if offset is None else HeadNorm(of_q, of_k, 1e-6, offset)
    expected_pool, (q, k, v) = pool.double(), torch.split(qkv, [6, 2, 2], dim=1)
    weights = (norm.q, norm.k) if norm else (None, None)
    turned = [
        reference_turned(part, cos, sin, weight, 1e-6, offset or 0.0)
        for part, weight in zip((q, k), weights, strict=True)
    ]
    reference_write_kv(expected_pool, 1, turned[1], v.double(), batch)
    plan = CpuPlan.build(batch, pool) if planner == "native" else PlainPlan.build(batch, pool, {None})
    assert plan is not None
    out = plan.rotate_and_store(pool, 1, qkv, cos=cos, sin=sin, norm=norm)
    close(out, turned[0], dtype)
    close(pool, expected_pool, dtype)


def test_a_library_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, cache = tmp_path / "native.cpp", tmp_path / "cache"
    source.write_text('extern "C" int one() { return 1; }')  # the shipped one takes half a minute
    monkeypatch.setattr(build, "SOURCE", source)
    monkeypatch.setenv("BATON_CACHE_DIR", str(cache))
    first = build.library()
    written = first.stat().st_mtime_ns
    assert build.library() == first
    assert first.stat().st_mtime_ns == written
    assert {path.suffix for path in cache.iterdir()} == {".so", ".lock"}
    source.write_text('extern "C" int two() { return 2; }')
    assert build.library() != first


@pytest.mark.deep
@pytest.mark.timeout(1800)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="builds for processors of x86-64")
@pytest.mark.parametrize(("processor", "feature"), [("x86-64", "sse2"), ("x86-64-v3", "avx2")])
def test_registers_of_other_widths(processor: str, feature: str, tmp_path: Path) -> None:
    """What lies how in panels and pages follows from the lanes of a register: four, eight or sixteen. That
    holds at whatever level the compiler optimizes: at -O1 it takes less than half the time."""
    features = build._processor().split()
    if feature not in features or (feature == "avx2" and "avx512f" not in features):
        pytest.skip(f"a processor without {feature}, or whose own registers these are")
    compiler, cache = tmp_path / "compiler", tmp_path / "cache"
    script = f'set -- "${{@/#-march=native/-march={processor}}}"; exec g++ "${{@/#-O3/-O1}}"'
    compiler.write_text(f"#!/bin/bash\n{script}\n")
    compiler.chmod(0o755)
    ours = {"CXX": str(compiler), "BATON_CACHE_DIR": str(cache), library.SWITCH: "native"}
    kernels = "matmul or native or norm or rotate or activation"
    of_kernels = "cpu_kernels", "attention", "quantized_matmul"
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", kernels)
    done = subprocess.run(
        (*command, *(str(Path(__file__).with_name(f"test_{name}.py")) for name in of_kernels)),
        env=os.environ | ours | {"PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert list(cache.glob("*.so")), "it has used other kernels"


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    choose = library.native.__wrapped__
    monkeypatch.setenv(library.SWITCH, "auto")
    assert choose() is None
    assert "Plain torch computes" in caplog.text
    monkeypatch.setenv(library.SWITCH, "native")
    with pytest.raises(ValueError, match=re.escape("no C++ compiler")):
        choose()
    monkeypatch.setenv(library.SWITCH, "plain")
    assert choose() is None
    monkeypatch.setenv(library.SWITCH, "fast")
    with pytest.raises(ValueError, match="BATON_CPU_KERNELS is 'fast'; allowed: auto, native, plain"):
        choose()
