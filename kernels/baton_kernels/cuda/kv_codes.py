"""FP8 keys and values (``baton_kernels.kv_fp8``) as kernels load and store them.

Devices from compute capability 8.9 on have the type and instructions that read it. For older ones the pool is
one of bytes, which are read by arithmetic. A kernel tells by the type of the pool's numbers: those of 8 bits
are codes. Codes are made by arithmetic on integers everywhere.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.kv_fp8 import FP8

FP8_ARCH = 89


def device_view(pool: Tensor, arch: int) -> Tensor:
    """``pool`` in a type that devices of compute capability ``arch`` have."""
    return pool.view(torch.uint8) if pool.dtype == FP8 and arch < FP8_ARCH else pool


@triton.jit
def numbers(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """x of type ``dtype`` if it holds codes, and as it is otherwise."""
    # What follows a return is compiled, too, so that only one branch may have one.
    if x.dtype == tl.uint8:
        # A product gives the exponent its bias, and small codes, which have no leading one, theirs.
        bits = x.to(tl.uint32)
        number = ((bits & 0x7F) << 20 | (bits & 0x80) << 24).to(tl.float32, bitcast=True)
        found = (number * 1.329227995784916e36).to(dtype)  # 2**120
    elif x.dtype == tl.float8e4nv:
        found = x.to(dtype)
    else:
        found = x
    return found


@triton.jit
def codes(x: tl.tensor, factor: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """x as numbers of ``dtype``: if those are codes, those nearest to x times ``factor`` (ties to even)."""
    if dtype.primitive_bitwidth > 8:
        found = x.to(dtype)
    else:
        scaled = tl.clamp(x.to(tl.float32) * factor, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        bits = scaled.to(tl.uint32, bitcast=True)
        size = bits & 0x7FFFFFFF
        normal = ((size + 0x7FFFF + (size >> 20 & 1)) >> 20) - 960
        # Below 2**-6 codes are multiples of 2**-9, which is where 2**14 has its last bit.
        small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
        code = tl.where(size < 0x3C800000, small, normal)
        code = tl.where(size > 0x7F800000, 0x7F, code) | bits >> 31 << 7
        found = code.to(tl.uint8).to(dtype, bitcast=True)
    return found
