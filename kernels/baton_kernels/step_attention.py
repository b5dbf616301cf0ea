"""What the layers of a model ask of one step's attention, whatever computes it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from baton_kernels.kv_fp8 import UNSCALED, KVScales
from baton_kernels.rotary import HeadNorm
from baton_kernels.window import Window


class StepAttention(Protocol):
    """One step's reads and writes of the pool, the same for all layers. ``scales``: of the layer."""

    def write_kv(
        self, pool: Tensor, layer: int, k: Tensor, v: Tensor, scales: KVScales = UNSCALED
    ) -> None: ...

    def rotate_and_store(
        self,
        pool: Tensor,
        layer: int,
        qkv: Tensor,
        *,
        cos: Tensor,
        sin: Tensor,
        norm: HeadNorm | None,
        scales: KVScales = UNSCALED,
    ) -> Tensor: ...

    def attend(
        self,
        pool: Tensor,
        layer: int,
        q: Tensor,
        *,
        scale: float,
        window: Window | None,
        softcap: float | None,
        sinks: Tensor | None = None,
        scales: KVScales = UNSCALED,
        out: Tensor | None = None,
    ) -> Tensor:
        """Returns ``out``, contiguous and of q's shape, once it is written; None: new memory. See
        ``baton_kernels.attention.paged_attention``."""
