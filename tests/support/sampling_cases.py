"""Random rows of logits and what is asked of them, for the tests of the sampling kernels."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.philox import uniforms
from baton.engine.sampler import packed
from baton.sampling_params import SamplingParams
from baton_kernels.reference import reference_draw

SURE = 1e-5
"""Rounding in float32 cannot make another token where the reference is as sure as this."""


@dataclass(frozen=True)
class Rows:
    logits: Tensor
    params: list[SamplingParams]
    positions: list[int]

    @classmethod
    def random(cls, seed: int, rows: int, vocab: int) -> Rows:
        """Logits of all kinds: smooth, rounded to bfloat16 (which makes many of them equal), mostly barred,
        all the same."""
        rng = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(rows, vocab, generator=generator)
        logits *= torch.tensor([[rng.choice([0.1, 1.0, 3.0, 10.0])] for _ in range(rows)])
        for row in range(rows):
            match rng.randrange(6):
                case 0 | 1:
                    logits[row] = logits[row].bfloat16().float()
                case 2:
                    logits[row, torch.rand(vocab, generator=generator) < 0.95] = -torch.inf
                    logits[row, rng.randrange(vocab)] = 1.0
                case 3:
                    logits[row] = 2.0
        params = [
            SamplingParams(
                max_tokens=1,
                seed=rng.randrange(-(2**63), 2**64),
                temperature=rng.choice([0.0, 0.3, 1.0, 1.0, 1.7]),
                top_k=rng.choice([-1, 0, 1, 2, 20, vocab // 2, 2 * vocab]),
                top_p=rng.choice([0.0, 0.1, 0.5, 0.9, 0.999, 1.0, 1.0, 1.0]),
                min_p=rng.choice([0.0, 0.0, 0.05, 1.0]),
            )
            for _ in range(rows)
        ]
        return cls(logits, params, [rng.choice([0, 1, 77, 2**33]) for _ in range(rows)])

    @property
    def packed(self) -> tuple[Tensor, Tensor]:
        return packed(self.params, self.positions, torch.device("cpu"))

    def expected(self) -> list[int | None]:
        """The token of each row by the float64 reference; None where it is not sure."""
        drawn = uniforms([p.seed for p in self.params], self.positions).tolist()
        found: list[int | None] = []
        for logits, p, fraction in zip(self.logits, self.params, drawn, strict=True):
            if p.greedy:
                found.append(int(logits.argmax()))
                continue
            top_k = min(max(p.top_k, 0), logits.numel())
            token, margin = reference_draw(logits, p.temperature, top_k, p.top_p, p.min_p, fraction)
            found.append(token if margin > SURE or p.min_p == 1 else None)
        return found
