"""The best tile sizes for the experts of well-known mixtures, as a part of ``loadtest.kernel_tuning``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from baton_kernels.cuda.tuned import Tiling
from loadtest.mixtures import MIXTURES, Mixture


@dataclass(frozen=True)
class ExpertSubject:
    """One product of a mixture's experts in tiles of so many pairs, and the name of its tile sizes."""

    kernel: str
    name: str
    mixture: Mixture
    tokens: int
    chosen: Tiling


def expert_subjects(arch: int, dtype: torch.dtype) -> Iterator[ExpertSubject]:
    from baton_kernels.cuda.expert_shapes import ExpertShape, token_counts

    for mixture in MIXTURES.values():
        top_k = mixture.routing.top_k
        shape = ExpertShape(mixture.hidden, mixture.inner, mixture.experts, dtype, arch)
        for tokens in token_counts(shape, top_k):
            if tokens * top_k <= shape.most_few:
                continue
            rows = shape.rows(tokens * top_k)
            for kernel, chosen in (
                ("gate_up", shape.untuned_gate_up(rows)),
                ("down", shape.untuned_down(rows)),
            ):
                yield ExpertSubject(kernel, shape.name(kernel, rows), mixture, tokens, chosen)


def expert_candidates(subject: ExpertSubject) -> Iterator[Tiling]:
    """Yield the other tile sizes to try. Both products go through tiles of the same pairs."""
    for tile, warps, stages in product((32, 64, 128), (4, 8), (2, 3, 4, 5)):
        yield Tiling(subject.chosen.rows, tile, warps, stages)


def expert_timer(
    subject: ExpertSubject,
    device: torch.device,
    dtype: torch.dtype,
    measure: Callable[[Callable[[], object]], float],
) -> Callable[[Tiling], float | None]:
    """Return a function that returns the seconds of a step with some tile sizes; None where these do not
    fit, or give another result."""
    from triton.runtime.errors import OutOfResources

    from baton_kernels.cuda.expert_shapes import ExpertShape, device_of
    from baton_kernels.cuda.experts import multiply

    x, experts, weights, tensors = subject.mixture.step(subject.tokens, dtype, device)
    shape = ExpertShape.of(tensors, device_of(device))
    expected: list[Tensor] = []

    def seconds(tiling: Tiling) -> float | None:
        own = replace(shape, tuned={subject.name: tiling})

        def run() -> Tensor:
            return multiply(x, experts, weights, tensors, weighs_input=False, shape=own)

        try:
            out = run()
        except OutOfResources:
            return None
        if not expected:
            expected.append(out)
        same = torch.allclose(out.float(), expected[0].float(), rtol=2e-2, atol=2e-2)
        return measure(run) if same else None

    return seconds
