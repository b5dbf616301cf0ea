"""The Triton kernels over a pool of FP8 against the float64 reference over dequantized KV, under triton's
interpreter: with the device's own type, and with bytes where it has none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

import pytest
import torch

from baton_kernels.kv_fp8 import FP8, UNSCALED, KVScales
from baton_kernels.reference import reference_attention
from baton_kernels.rotary import HeadNorm
from tests.support.fp8_steps import ALL_CODES, dequantized, encoded
from tests.support.paged_steps import TOLERANCE, Case, lay_out, sinks_of

if find_spec("triton") is None:
    pytest.skip("triton has no build for this machine", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("tests/gpu runs them on the device", allow_module_level=True)

from tests.support.interpreted import attention, shapes

pytestmark = pytest.mark.deep

ARCHS = (80, 90)
SCALES = KVScales(0.25, 1.7)
CASES: Mapping[str, Case] = MappingProxyType(
    {
        "float32": Case(4, 2, 64, 16, None, (1, 70, 300), ((0, 40), (43, 5))),
        "bfloat16, window": Case(6, 2, 96, 32, 20, (40, 129), ((31, 40),), torch.bfloat16),
        "float16, sinks, cap": Case(
            4, 1, 128, 16, None, (90,), ((70, 20),), torch.float16, softcap=5.0, has_sinks=True
        ),
        "split over programs": Case(2, 1, 64, 64, None, (700,), ((1100, 20),)),
        "drafts": Case(8, 2, 64, 16, 50, (60, 7, 300), (), queries=5),
    }
)


@pytest.mark.parametrize(
    ("name", "arch"),
    [*((name, 90) for name in CASES), ("float32", 80), ("bfloat16, window", 80)],
)
def test_attention_is_that_over_dequantized_kv(name: str, arch: int) -> None:
    torch.manual_seed(0)
    case = CASES[name]
    pool, batch = lay_out(replace(case, dtype=torch.float32))
    pool = encoded(pool, UNSCALED)
    q = torch.randn(batch.positions.numel(), case.heads, case.head_dim).to(case.dtype)
    how: dict[str, Any] = {"scale": case.head_dim**-0.5, "window": case.window, "softcap": case.softcap}
    how["sinks"] = sinks_of(case)
    device = shapes.Device(3, arch)
    plan = attention.CudaPlan.build(batch, pool, {case.window}, case.heads, device)
    out = plan.attend(pool, 1, q, **how, scales=SCALES)
    expected = reference_attention(dequantized(pool, SCALES), 1, q, batch, **how)
    assert out.dtype == case.dtype
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=TOLERANCE[case.dtype])


@pytest.mark.parametrize("arch", ARCHS)
def test_each_number_becomes_the_nearest_code(arch: int) -> None:
    numbers = ALL_CODES.float()
    between = (numbers[:-1] + numbers[1:]) / 2
    near = torch.cat((numbers, between, between * 1.01, between * 0.99, torch.tensor([464.0, 465.0, 1e6])))
    k = torch.zeros(16, 1, 64)
    k.view(-1)[: 2 * len(near)] = torch.cat((near, -near))
    pool, batch = lay_out(Case(1, 1, 64, 16, None, (), ((0, 16),)), layers=1)
    pool = encoded(pool, UNSCALED)
    plan = attention.CudaPlan.build(batch, pool, {None}, 1, shapes.Device(3, arch))
    plan.write_kv(pool, 0, k, 2 * k, KVScales(1.0, 2.0))
    stored = pool.float()[batch.slot_blocks, 0, 0, :, batch.slot_offsets]
    nearest = k[:, 0].clamp(-448, 448).to(FP8).float()
    assert torch.equal(stored, torch.stack((nearest, nearest), dim=1))


@pytest.mark.parametrize("arch", ARCHS)
def test_what_is_rotated_is_stored_as_codes(arch: int) -> None:
    torch.manual_seed(0)
    case = Case(6, 2, 64, 16, None, (5,), ((3, 6),), torch.bfloat16)
    pool, batch = lay_out(case)
    tokens = len(batch.positions)
    qkv = (3 * torch.randn(tokens, 10, 64)).to(case.dtype)
    norm = HeadNorm(torch.rand(64).to(case.dtype), torch.rand(64).to(case.dtype), 1e-5)
    angles = torch.randn(tokens, 1, 32)
    cos, sin = angles.cos().repeat(1, 1, 2), torch.cat((-angles.sin(), angles.sin()), dim=-1)
    how: dict[str, Any] = {"cos": cos, "sin": sin, "norm": norm}
    plain, codes = torch.zeros_like(pool), torch.zeros(pool.shape, dtype=FP8)
    of_plain = attention.CudaPlan.build(batch, plain, {None}, 6, shapes.Device(3, arch))
    of_codes = attention.CudaPlan.build(batch, codes, {None}, 6, shapes.Device(3, arch))
    q = of_plain.rotate_and_store(plain, 1, qkv, **how)
    assert torch.equal(of_codes.rotate_and_store(codes, 1, qkv, **how, scales=SCALES), q)
    assert torch.equal(codes.float(), encoded(plain, SCALES).float())
