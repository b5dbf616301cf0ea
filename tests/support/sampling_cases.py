"""Rows of logits and what is asked of them, for the tests of the sampling kernels."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from baton.core.sampling_params import ResolvedSampling
from baton.engine.sampling.philox import exponentials
from baton.engine.sampling.sampler import BUCKET, packed
from baton_kernels.reference import reference_adjust, reference_draw

SURE = 3e-5
"""Rounding in float32 cannot make another token where the reference is as sure as this."""

LEVELS: Mapping[str, Sequence[object]] = MappingProxyType(
    {
        "shape": ("smooth", "rounded", "barred", "flat"),
        "spread": (0.1, 1.0, 3.0, 10.0),
        "temperature": (0.0, 0.3, 1.0, 1.7),
        "top_k": (-1, 0, 1, 2, 20, 1.5),
        "top_p": (0.0, 0.1, 0.5, 0.9, 0.999, 1.0),
        "min_p": (0.0, 0.05, 1.0),
        "position": (0, 1, 77, 2**33),
    }
)
"""``shape`` and ``spread`` are those of the logits: smooth, rounded to bfloat16 (which makes many of them
equal), mostly barred, all the same. A ``top_k`` of 1.5 is half as much again as there are tokens."""


@dataclass(frozen=True)
class Rows:
    logits: Tensor
    params: list[ResolvedSampling]
    positions: list[int]

    @classmethod
    def of(cls, choices: Sequence[Mapping[str, object]], vocab: int, seed: int = 0) -> Rows:
        """A row for each of ``choices`` of ``LEVELS``."""
        rng = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        made = [_logits(choice, vocab, rng, generator) for choice in choices]
        params = []
        for choice in choices:
            fields = {name: choice[name] for name in ("temperature", "top_p", "min_p")}
            top_k = choice["top_k"] if isinstance(choice["top_k"], int) else vocab + vocab // 2
            params.append(
                ResolvedSampling(max_tokens=1, seed=rng.randrange(-(2**63), 2**64), top_k=top_k, **fields)  # type: ignore[arg-type]
            )
        return cls(torch.stack(made), params, [int(choice["position"]) for choice in choices])  # type: ignore[call-overload]

    @classmethod
    def random(cls, seed: int, rows: int, vocab: int) -> Rows:
        rng = random.Random(seed)
        choices = [{name: rng.choice(values) for name, values in LEVELS.items()} for _ in range(rows)]
        return cls.of(choices, vocab, seed)

    @property
    def packed(self) -> tuple[Tensor, Tensor]:
        return packed(self.params, self.positions, torch.device("cpu"))

    def expected(self) -> list[int | None]:
        """The token of each row by the float64 reference; None where it is not sure."""
        found: list[int | None] = []
        for logits, p, position in zip(self.logits, self.params, self.positions, strict=True):
            if p.greedy:
                found.append(int(logits.argmax()))
                continue
            top_k = min(max(p.top_k, 0), logits.numel())
            times = race_times(p.seed, position, logits.numel())
            token, margin = reference_draw(logits, p.temperature, top_k, p.top_p, p.min_p, times, BUCKET)
            found.append(token if margin > SURE else None)
        return found


def race_times(seed: int, position: int, vocab: int) -> Tensor:
    return torch.from_numpy(exponentials([seed], [position], BUCKET - (-vocab // BUCKET))[0])


def _logits(
    choice: Mapping[str, object], vocab: int, rng: random.Random, generator: torch.Generator
) -> Tensor:
    spread: Any = choice["spread"]
    logits: Tensor = torch.randn(vocab, generator=generator) * spread
    match choice["shape"]:
        case "rounded":
            return logits.bfloat16().float()
        case "barred":
            logits[torch.rand(vocab, generator=generator) < 0.95] = -torch.inf
            logits[rng.randrange(vocab)] = 1.0
        case "flat":
            logits[:] = 2.0
    return logits


def adjusted(
    logits: Tensor, params: ResolvedSampling, prompt: Sequence[int], outputs: Sequence[int]
) -> Tensor:
    """One row [V] of the reference, in float64, behind these tokens."""
    seen = {token: float(outputs.count(token)) for token in outputs}
    if params.repetition_penalty != 1:
        seen = dict.fromkeys(prompt, 0.0) | seen
    values = reference_adjust(
        logits.tolist(),
        [run[0] for run in params.bad_word_ids],
        dict(params.logit_bias),
        seen if params.penalizes else {},
        params.repetition_penalty,
        params.frequency_penalty,
        params.presence_penalty,
    )
    return torch.tensor(values, dtype=torch.float64)
