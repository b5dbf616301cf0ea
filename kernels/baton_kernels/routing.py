"""The choice of experts for each token: a pure function of the router's logits."""

from __future__ import annotations

import torch
from torch import Tensor

from baton_kernels.cpu import experts as cpu_experts
from baton_kernels.routing_rule import Routing, Scores

__all__ = ("Routing", "Scores", "plainly_route", "route")


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """logits [T, experts] of any float type -> the chosen experts [T, top_k] int32, and their weights [T,
    top_k] float32. ``bias`` [experts] float32. By the kernels of the logits' device, by plain torch where
    there are none. ValueError if so many cannot be chosen."""
    routing.check(logits.shape[-1])
    if logits.device.type == "cuda":
        from baton_kernels.cuda import routing as kernels  # triton is only there where CUDA is

        return kernels.route(logits, routing, bias)
    chosen = cpu_experts.route(logits, routing, bias)
    return plainly_route(logits, routing, bias) if chosen is None else chosen


def plainly_route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Chooses like ``route``, by plain torch."""
    logits = logits.float()
    if routing.scores == "sparsemixer":
        return _sparsemixer(logits, routing)
    scores = logits.softmax(-1) if routing.scores == "softmax" else logits.sigmoid()
    # Without a bias, logits are in the order of the scores, and differ where scores are rounded to 0 or 1.
    choice = logits if bias is None and routing.groups == 1 else scores
    if bias is not None:
        choice = scores + bias
    if routing.groups > 1:
        grouped = choice.view(len(choice), routing.groups, choice.shape[1] // routing.groups)
        best = grouped.topk(min(routing.group_best, grouped.shape[-1]), dim=-1).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool)
        kept.scatter_(-1, best.topk(routing.top_groups, dim=-1).indices, True)
        choice = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
    experts = choice.topk(routing.top_k, dim=-1).indices
    weights = scores.gather(-1, experts)
    if routing.renormalize:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=routing.least_sum)
    return experts.int(), weights * routing.scale


def _sparsemixer(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """One expert after the other (https://arxiv.org/abs/2409.12136, section 2.2): each weight is a softmax
    over the experts that are nearly as good, among those not chosen before."""
    experts, weights, left = [], [], logits
    for _ in range(routing.top_k):
        best, index = left.max(-1, keepdim=True)
        far = (best - logits) / logits.abs().clamp(min=best) > 2 * routing.jitter
        experts.append(index)
        weights.append(left.masked_fill(far, -torch.inf).softmax(-1).gather(-1, index))
        left = left.scatter(-1, index, -torch.inf)
    return torch.cat(experts, -1).int(), torch.cat(weights, -1)
