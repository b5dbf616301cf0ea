"""The numbers that codes of few bits stand for, and back, by integer arithmetic where a device has no
instruction for it.

No code that stands for NaN is known here: checkpoints with such weights are refused when they are loaded.
"""

from __future__ import annotations

import triton
import triton.language as tl

E4M3_MAX = tl.constexpr(448.0)
"""The largest number of fp8."""


@triton.jit
def e4m3_values(bits: tl.tensor) -> tl.tensor:
    """uint8 -> the float32 that they are as e4m3: a float16 has one bit more of exponent, with a bias that is
    larger by 8, and subnormals alike."""
    wide = (bits & 128).to(tl.uint16) << 8 | (bits & 127).to(tl.uint16) << 7
    return wide.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def e2m1_values(bits: tl.tensor) -> tl.tensor:
    """uint8 below 16 -> the float32 that they are as e2m1: see ``e4m3_values``; the bias is larger by 14."""
    wide = (bits & 8).to(tl.uint16) << 12 | (bits & 7).to(tl.uint16) << 9
    return wide.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def e8m0_values(bits: tl.tensor) -> tl.tensor:
    """uint8 -> the float32 that they are as e8m0: powers of two, of which the least is subnormal."""
    wide = tl.where(bits == 0, 1 << 22, bits.to(tl.int32) << 23)
    return wide.to(tl.float32, bitcast=True)


@triton.jit
def small_values(codes: tl.tensor) -> tl.tensor:
    """uint8 -> float32. As the last bits of 2**23 they need no conversion, which takes longer."""
    return (codes.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def e4m3_bits(numbers: tl.tensor) -> tl.tensor:
    """float32 -> the uint8 of the nearest e4m3, ties to even; beyond 448 that of 448. NaN stays NaN."""
    bits = numbers.to(tl.int32, bitcast=True)
    size = tl.where(tl.abs(numbers) > E4M3_MAX, E4M3_MAX, tl.abs(numbers))
    # From 2**-6 on, three bits of the fraction are kept, and the exponent's bias is smaller by 120. A carry
    # goes on into the exponent.
    whole = size.to(tl.int32, bitcast=True)
    normal = (whole + 0x7FFFF + (whole >> 20 & 1) >> 20) - (120 << 3)
    # Below, the last bit is 2**-9: that of a float32 of 2**14.
    least = (size + 16384.0).to(tl.int32, bitcast=True) - (141 << 23)
    kept = tl.where(size < 0.015625, least, normal)
    kept = tl.where(numbers == numbers, kept, 127)
    return (kept | bits >> 24 & 128).to(tl.uint8)
