"""Keys and values of the latest positions of a fixed number of sequences."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

NONE = -1
"""The position of an empty place."""


class KvRing:
    """A ring of ``window`` places for each of ``slots`` sequences: position p lies in place p % window.

    The last write counts, so drafts that were refused need no clean-up: rows before their position do not see
    them, and the kept token at their position overwrites them.
    """

    def __init__(
        self,
        slots: int,
        kv_heads: int,
        window: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.window = window
        self.device = device
        shape = (slots, window, kv_heads, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.positions = torch.full((slots, window), NONE, dtype=torch.int64, device=device)

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes + self.positions.nbytes

    def write(self, slots: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """Writes keys and values. slots [B]; positions [B, n], rising, no more than ``window`` different
        ones; k and v [B, kv_heads, n, head_dim]."""
        at = (slots.unsqueeze(1), positions % self.window)
        self.keys[at] = k.transpose(1, 2)
        self.values[at] = v.transpose(1, 2)
        self.positions[at] = positions

    def attend(self, slots: Tensor, positions: Tensor, q: Tensor) -> Tensor:
        """q [B, heads, n, head_dim] of rows at ``positions`` [B, n], written before -> the same shape.

        A row sees the stored positions up to its own. In a long run of rows, the first ones miss what the
        last ones have overwritten.
        """
        there = self.positions[slots].unsqueeze(1)
        seen = (there != NONE) & (there <= positions.unsqueeze(2))
        k, v = self.keys[slots].transpose(1, 2), self.values[slots].transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen.unsqueeze(1), enable_gqa=True)

    def drop_from(self, slot: int, position: int) -> None:
        """Empties the places of a sequence that hold ``position`` or a later one."""
        row = self.positions[slot]
        row.masked_fill_(row >= position, NONE)
