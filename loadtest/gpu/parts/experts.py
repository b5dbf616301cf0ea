"""The experts of one layer of well-known mixtures, from few tokens to a long prompt, and their router.

The limit is the longer of two times: to read, at a copy's rate, the weights of the experts that some token
goes through, and to do the operations at a matmul's. ``grouped_mm`` measures torch's grouped matmul as well,
over the same pairs, sorted before: gather, both products and activation, without biases or the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from baton_kernels import routing
from baton_kernels.activation import gated
from baton_kernels.expert_tensors import ExpertTensors
from baton_kernels.experts import loop_over_experts
from loadtest.gpu.bench import Bench
from loadtest.mixtures import MIXTURES, Mixture

TABLE = "Experts of one layer"
TOKENS = (1, 4, 16, 64, 256, 1024, 8192)
TINY: Mapping[str, Mixture] = {"tiny": Mixture(32, 16, 8, routing.Routing(2))}
SPARE_S = 8.0


def measure(bench: Bench, beside: str = "") -> None:
    """Measure every mixture. ``beside``: ``grouped_mm``, or nothing."""
    roof = bench.roof()
    for name, mixture in (TINY if bench.dry else MIXTURES).items():
        for tokens in TOKENS[:3] if bench.dry else TOKENS:
            if bench.left < SPARE_S:
                bench.results.missing(f"{name}, {tokens} tokens", "no time was left")
                continue
            x, experts, weights, tensors = mixture.step(tokens, bench.dtype, bench.device)
            taken = bench.seconds(ours(bench, x, experts, weights, tensors))
            bytes_read, operations = work(experts, tensors)
            limit = max(bytes_read / roof.bytes_per_s, operations / roof.flops)
            row: dict[str, float | None] = {
                "ms": taken * 1e3,
                "GB/s": bytes_read / taken / 1e9,
                "TF/s": operations / taken / 1e12,
                "limit, ms": limit * 1e3,
                "of the limit": limit / taken,
                "router, ms": bench.seconds(router(bench, mixture, tokens)) * 1e3,
            }
            if beside:
                row["grouped_mm, ms"] = bench.seconds(by_torch(x, experts, tensors)) * 1e3
            bench.results.row(TABLE, model=name, tokens=tokens, **row)


def ours(
    bench: Bench, x: Tensor, experts: Tensor, weights: Tensor, tensors: ExpertTensors
) -> Callable[[], Tensor]:
    step = (x, experts, weights, tensors)
    if not bench.on_cuda:
        return partial(loop_over_experts, *step, weighs_input=False)
    from baton_kernels.cuda.experts import multiply

    return partial(multiply, *step, weighs_input=False)


def router(bench: Bench, mixture: Mixture, tokens: int) -> Callable[[], object]:
    logits = torch.randn(tokens, mixture.experts, device=bench.device).to(bench.dtype)
    if not bench.on_cuda:
        return partial(routing.route, logits, mixture.routing)
    from baton_kernels.cuda.routing import route

    return partial(route, logits, mixture.routing)


def work(experts: Tensor, tensors: ExpertTensors) -> tuple[int, int]:
    """Return the bytes of the weights of all experts that are chosen, and the operations."""
    numbers = tensors.gate_up[0].numel() + tensors.down[0].numel()
    chosen = int((experts.flatten().bincount() > 0).sum())
    return chosen * numbers * tensors.down.itemsize, 2 * experts.numel() * numbers


def by_torch(x: Tensor, experts: Tensor, tensors: ExpertTensors) -> Callable[[], Tensor]:
    """Return the products of sorted pairs by ``torch.nn.functional.grouped_mm``."""
    flat = experts.flatten()
    order = flat.argsort(stable=True) // experts.shape[1]
    ends = flat.bincount(minlength=len(tensors.down)).cumsum(0).int()

    def run() -> Tensor:
        both = F.grouped_mm(x[order], tensors.gate_up.mT, offs=ends)
        gate, up = both.chunk(2, -1)
        out: Tensor = F.grouped_mm(gated(gate, up, tensors.activation), tensors.down.mT, offs=ends)
        return out

    return run
