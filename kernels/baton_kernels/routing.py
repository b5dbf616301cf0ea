"""The choice of experts for each token: a pure function of the router's logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Scores = Literal["softmax", "sigmoid", "sparsemixer"]


@dataclass(frozen=True, slots=True)
class Routing:
    """The rule by which a family chooses experts and weighs them.

    Scores are the softmax or the sigmoid of the logits. A bias, where the checkpoint has one, is added to
    them for the choice alone. With groups, only the ``top_groups`` groups of the largest sums of their two
    best scores are chosen from. Choosing by logits and a softmax over the chosen (gpt-oss, Granite) is the
    softmax over all, renormalized.
    """

    top_k: int
    scores: Scores = "softmax"
    renormalize: bool = False
    """Whether the weights of a token's experts are divided by their sum."""
    scale: float = 1.0
    """A factor of the weights, after renormalizing."""
    groups: int = 1
    top_groups: int = 1
    jitter: float = 0.0
    """sparsemixer (Phi-3.5-MoE) only: twice this share below the best logit, an expert is left out of the
    softmax that gives the weight."""
    weighs_input: bool = False
    """Whether weights multiply an expert's input (Llama 4), not its output."""


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """logits [T, experts] of any float type -> the chosen experts [T, top_k] int32, and their weights [T,
    top_k] float32. ``bias`` [experts] float32."""
    logits = logits.float()
    if routing.scores == "sparsemixer":
        return _sparsemixer(logits, routing)
    scores = logits.softmax(-1) if routing.scores == "softmax" else logits.sigmoid()
    choice = scores if bias is None else scores + bias
    if routing.groups > 1:
        grouped = choice.unflatten(-1, (routing.groups, -1))
        best = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool)
        kept.scatter_(-1, best.topk(routing.top_groups, dim=-1).indices, True)
        choice = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
    experts = choice.topk(routing.top_k, dim=-1).indices
    weights = scores.gather(-1, experts)
    if routing.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
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
