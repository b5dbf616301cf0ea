"""Logits in float64, and how far from them float32 may come.

How far depends on the order in which a processor's kernels sum, and on the model: sums over a prompt, and
what is divided by a norm, lose more. So it is measured where a test runs, on the model itself: how far
transformers' own float32 logits are from its float64 ones. Other orders of the same sums err otherwise, and
not many times farther.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from tests.support.tiny_models import load_oracle

SAFETY = 8
"""How many times farther another order of sums may be. Of all families the farthest is 2.5 times."""


@dataclass(frozen=True)
class Exact:
    """Expected logits, [positions, vocab]."""

    logits: Tensor
    error: float
    """How far one order of float32 sums is from them, where it is farthest."""

    def __getitem__(self, positions: int | slice) -> Exact:
        return replace(self, logits=self.logits[positions])


def exact_logits(path: Path, ids: Sequence[int]) -> Exact:
    """Logits of transformers of every position, from one pass over the whole sequence."""
    with torch.inference_mode():
        double, single = (
            load_oracle(path, dtype)(torch.tensor([ids]), use_cache=False).logits[0].double()
            for dtype in ("float64", "float32")
        )
    return Exact(double, float((single - double).abs().max()))


def joined(parts: Sequence[Exact]) -> Exact:
    return Exact(torch.cat([part.logits for part in parts]), max(part.error for part in parts))


def alike(logits: Tensor, measured: Exact) -> Exact:
    """Expect these logits, of a model with the sizes of one that was measured: its sums are as long, whatever
    its weights are."""
    return Exact(logits, measured.error * float(logits.std() / measured.logits.std()))


def assert_same(logits: Tensor, expected: Exact) -> None:
    """Equal up to the order of float32 sums."""
    rounding = torch.finfo(torch.float32).eps * float(expected.logits.abs().max())
    limit = SAFETY * max(expected.error, rounding)
    torch.testing.assert_close(logits.double(), expected.logits.double(), rtol=0, atol=limit)
