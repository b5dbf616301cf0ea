"""The Triton kernels under triton's interpreter, which runs them on the CPU with numpy.

triton decides when it is imported, so this must be the first to import it: nothing else does where there is
no CUDA device. Child processes do not inherit the choice.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import torch

if "triton" in sys.modules:
    raise RuntimeError("triton was imported before its interpreter was chosen")
os.environ["TRITON_INTERPRET"] = "1"
try:
    # triton imports this at the first launch, when it looks at the choice again.
    import triton
    import triton.experimental.gluon
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    from baton_kernels.cuda import (
        attention,
        blocks,
        causal_conv,
        decode,
        delta_rule,
        expert_shapes,
        experts,
        few_experts,
        latent,
        logits,
        mamba,
        many_experts,
        products,
        quantized,
        rotary,
        rounding,
        routing,
        rows,
        sampling,
        shapes,
        whole_norm,
    )
    from baton_kernels.cuda.sampling import _times

    @triton.jit  # type: ignore[untyped-decorator]
    def times_of(
        out: tl.tensor,
        seed: tl.tensor,
        position: tl.tensor,
        COUNT: tl.constexpr,  # noqa: N803
    ) -> None:
        """The random numbers that a race of the sampling kernel has for the indices below ``COUNT``."""
        indices = tl.arange(0, COUNT)
        tl.store(out + indices, _times(tl.load(seed), tl.load(position), indices.to(tl.int64)))
finally:
    del os.environ["TRITON_INTERPRET"]

__all__ = [
    "InterpreterBuilder",
    "as_on_a_device",
    "attention",
    "blocks",
    "causal_conv",
    "decode",
    "delta_rule",
    "expert_shapes",
    "experts",
    "few_experts",
    "latent",
    "logits",
    "mamba",
    "many_experts",
    "products",
    "quantized",
    "rotary",
    "rounding",
    "routing",
    "rows",
    "sampling",
    "shapes",
    "times_of",
    "whole_norm",
]


# Or the rows of small vocabularies would be one tile, mostly nothing, and all their tokens in registers.
_TILES = {name: getattr(sampling, name) for name in ("TILE", "COLUMNS")}
sampling.TILE = 1024
sampling.COLUMNS = 256
# Or most of the time would go to starting programs.
few_experts.COLUMNS = 16


def as_on_a_device() -> None:
    """Let the sampling kernel have the tiles that it has on a device, from now on."""
    for name, size in _TILES.items():
        setattr(sampling, name, size)


def _widened(handle: Any) -> Any:
    """The interpreter holds bfloat16 and fp8 as their bits."""
    if handle.dtype.scalar == tl.float8e4nv:
        return torch.from_numpy(handle.data.view(np.uint8)).view(torch.float8_e4m3fn).float().numpy()
    if handle.dtype.scalar == tl.bfloat16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data


def _dot(self: object, a: Any, b: Any, d: Any, input_precision: object, max_num_imprecise_acc: object) -> Any:
    """Its own multiplies those bits as integers."""
    product = np.matmul(_widened(a), _widened(b), dtype=d.data.dtype)
    return TensorHandle(product + d.data, d.dtype.scalar)


_splat = InterpreterBuilder.create_splat


def _of_one_type(self: object, type_: Any, given: Any) -> Any:
    """Make masks of comparisons: triton's own makes numbers of the type of what was compared."""
    if given.data.dtype == np.bool_:
        given = TensorHandle(given.data, tl.int1)
    return _splat(self, type_, given)


InterpreterBuilder.create_dot = _dot
InterpreterBuilder.create_splat = _of_one_type
