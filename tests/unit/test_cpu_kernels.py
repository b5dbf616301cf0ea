"""The CPU's kernels against float64: matmul with packed weights, norms, rotation; and how they are built."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton_kernels import int8
from baton_kernels.attention import AttentionPlan
from baton_kernels.cpu import build, library
from baton_kernels.cpu.attention import CpuPlan
from baton_kernels.cpu.linear import PackedWeight
from baton_kernels.cpu.rows import add_rms_norm
from baton_kernels.int8 import Int8Weight, quantize
from baton_kernels.plain import PlainPlan
from baton_kernels.rotary import HeadNorm
from tests.support.paged_steps import Case, lay_out
from tests.support.threads import in_threads
from tests.support.threads import threads as all_threads

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
TYPES = list(TOLERANCE)


def packed(weight: Tensor, bias: Tensor | None, *, gated: bool = False) -> PackedWeight:
    made = PackedWeight.of(weight, bias, gated=gated)
    assert made is not None, "this machine has no compiler, which the README asks for"
    return made


def packed_int8(
    weight: Int8Weight, bias: Tensor | None, dtype: torch.dtype, *, gated: bool = False
) -> PackedWeight:
    made = PackedWeight.of(weight, bias, gated=gated, dtype=dtype)
    assert made is not None
    return made


def exactly(weight: Int8Weight) -> Tensor:
    """What int8 stand for, in float64."""
    return weight.values.double() * weight.scales.double()[:, None]


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


@pytest.mark.parametrize("dtype", [*TYPES, torch.float16])
def test_each_row_is_rounded_to_the_steps_of_its_own_scale(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(70, 33) * torch.logspace(-3, 3, 70)[:, None]).to(dtype)
    weight[5] = 0
    values, scales = rounded = quantize(weight)
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
    monkeypatch.setattr(int8, "_AT_ONCE", 100)
    for ours, theirs in zip(quantize(weight), whole, strict=True):
        assert torch.equal(ours, theirs)


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
@pytest.mark.parametrize("window", [None, 700])
def test_attention_in_several_threads(window: int | None, dtype: torch.dtype) -> None:
    """Rows that decode are the same in all; those of a prompt up to the order of their sums."""
    torch.manual_seed(0)
    pool, batch = lay_out(Case(6, 2, 64, 16, window, (5, 1300, 512), ((0, 20), (900, 150)), dtype))
    q = torch.randn(batch.positions.numel(), 6, 64).to(dtype)

    def attend(threads: int) -> Tensor:
        with in_threads(threads):
            plan = CpuPlan.build(batch, pool)
            assert plan is not None
            return plan.attend(pool, 1, q, scale=0.125, window=window, softcap=None)

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
        deadline = time.monotonic() + 10
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


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [16, 100, 896])
def test_add_norm(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    x, residual, weight = torch.randn(20, size).to(dtype), torch.randn(20, size), torch.rand(size).to(dtype)
    total = residual.double() + x.double()
    expected = total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    kept = residual.clone()
    out = add_rms_norm(x, kept, weight, 1e-5)
    assert out is not None
    close(out, expected, dtype)
    close(kept, total, torch.float32)
    again = add_rms_norm(None, kept, weight, 1e-5)
    assert again is not None
    assert torch.equal(again, out)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("normed", [False, True])
def test_rotate_and_store(normed: bool, dtype: torch.dtype) -> None:
    """As plain torch does it in float64."""
    torch.manual_seed(0)
    pool, batch = lay_out(Case(6, 2, 64, 16, None, (5, 40), ((0, 20),), dtype))
    tokens = batch.positions.numel()
    qkv, (cos, sin) = torch.randn(tokens, 10, 64).to(dtype), torch.randn(2, tokens, 1, 64)
    weights = torch.rand(2, 64).to(dtype)
    exact_pool = pool.double()
    exact = AttentionPlan(PlainPlan.build(batch, exact_pool, {None})).step.rotate_and_store(
        exact_pool,
        1,
        qkv.double(),
        cos=cos.double(),
        sin=sin.double(),
        norm=HeadNorm(weights[0].double(), weights[1].double(), 1e-6) if normed else None,
    )
    plan = CpuPlan.build(batch, pool)
    assert plan is not None
    norm = HeadNorm(weights[0], weights[1], 1e-6) if normed else None
    q = plan.rotate_and_store(pool, 1, qkv, cos=cos, sin=sin, norm=norm)
    close(q, exact, dtype)
    close(pool, exact_pool, dtype)


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


@pytest.mark.skipif(platform.machine() != "x86_64", reason="builds for processors of x86-64")
@pytest.mark.parametrize(("processor", "feature"), [("x86-64", "sse2"), ("x86-64-v3", "avx2")])
def test_registers_of_other_widths(processor: str, feature: str, tmp_path: Path) -> None:
    """What lies how in panels and pages follows from the lanes of a register: four, eight or sixteen."""
    features = build._processor().split()
    if feature not in features or (feature == "avx2" and "avx512f" not in features):
        pytest.skip(f"a processor without {feature}, or whose own registers these are")
    compiler, cache = tmp_path / "compiler", tmp_path / "cache"
    compiler.write_text(f'#!/bin/bash\nexec g++ "${{@/#-march=native/-march={processor}}}"\n')
    compiler.chmod(0o755)
    ours = {"CXX": str(compiler), "BATON_CACHE_DIR": str(cache), library.SWITCH: "native"}
    kernels = "matmul or native or norm or rotate"
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", kernels)
    done = subprocess.run(
        (*command, __file__, str(Path(__file__).with_name("test_attention.py"))),
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
