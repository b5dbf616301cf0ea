"""The choice of experts of every token in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.cuda.launch import bound
from baton_kernels.cuda.shapes import next_power_of_two
from baton_kernels.routing_rule import Routing

LARGEST_EXPERTS = 1024
SCORES_OF_A_WARP = 256


@triton.jit
def _first_best(choice: tl.tensor, ids: tl.tensor, EXPERTS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The greatest number of ``choice`` [GROUPS, MEMBERS], and the least of the ``ids`` that have it.

    Where nothing compares, as with NaN, it is the last id: what follows may index with it."""
    best = tl.max(tl.max(choice, 1), 0)
    return best, tl.min(tl.min(tl.where(choice == best, ids, EXPERTS - 1), 1), 0)


@triton.jit
def _kept_groups(
    choice: tl.tensor,
    member: tl.tensor,
    PER_GROUP: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    GROUPS: tl.constexpr,
    MEMBERS: tl.constexpr,
) -> tl.tensor:
    """Whether each group, [GROUPS], is among the ``TOP_GROUPS`` of the largest sums of their best, one or
    two."""
    left = tl.max(choice, 1)
    if PER_GROUP > 1 and GROUP_BEST > 1:
        first = tl.min(tl.where(choice == left[:, None], member, MEMBERS), 1)
        left += tl.max(tl.where(member == first[:, None], float("-inf"), choice), 1)
    groups = tl.arange(0, GROUPS)
    kept = groups < 0
    for _ in range(TOP_GROUPS):
        taken = groups == tl.min(tl.where(left == tl.max(left, 0), groups, GROUPS - 1), 0)
        kept = kept | taken
        left = tl.where(taken, float("-inf"), left)
    return kept


@bound
@triton.jit(do_not_specialize_on_alignment=["logits", "bias", "experts", "weights"])
def _route(
    logits: tl.tensor,
    bias: tl.tensor,
    experts: tl.tensor,
    weights: tl.tensor,
    row_stride: tl.tensor,
    least_sum: tl.tensor,
    scale: tl.tensor,
    jitter: tl.tensor,
    EXPERTS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    SCORES: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GROUPS: tl.constexpr,
    MEMBERS: tl.constexpr,
    PLACES: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)[:, None]
    member = tl.arange(0, MEMBERS)[None, :]
    ids = group * PER_GROUP + member
    real = (member < PER_GROUP) & (ids < EXPERTS)
    logit = tl.load(logits + token * row_stride + ids, mask=real, other=float("-inf")).to(tl.float32)
    scores = logit
    if SCORES == "softmax":
        powers = tl.exp(logit - tl.max(tl.max(logit, 1), 0))
        scores = powers / tl.sum(tl.sum(powers, 1), 0)
    if SCORES == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-logit))
    choice = scores
    if HAS_BIAS:
        choice += tl.load(bias + ids, mask=real, other=0.0)
    elif PER_GROUP == EXPERTS:
        choice = logit  # in the order of the scores, and different where those are rounded to 0 or 1
    choice = tl.where(real, choice, float("-inf"))
    if PER_GROUP < EXPERTS:
        kept = _kept_groups(choice, member, PER_GROUP, TOP_GROUPS, GROUP_BEST, GROUPS, MEMBERS)
        choice = tl.where(kept[:, None], choice, float("-inf"))

    places = tl.arange(0, PLACES)
    chosen = tl.zeros([PLACES], tl.int32)
    values = tl.zeros([PLACES], tl.float32)
    for place in range(TOP_K):
        best, expert = _first_best(choice, ids, EXPERTS)
        taken = ids == expert
        if SCORES == "sparsemixer":
            far = best - logit > 2.0 * jitter * tl.maximum(tl.where(real, tl.abs(logit), 0.0), best)
            value = 1.0 / tl.sum(tl.sum(tl.where(far, 0.0, tl.exp(choice - best)), 1), 0)
        else:
            value = tl.sum(tl.sum(tl.where(taken, scores, 0.0), 1), 0)
        chosen = tl.where(places == place, expert, chosen)
        values = tl.where(places == place, value, values)
        choice = tl.where(taken, float("-inf"), choice)
    if RENORMALIZE:
        values = values / tl.maximum(tl.sum(values, 0), least_sum)
    target = token * TOP_K + places
    tl.store(experts + target, chosen, mask=places < TOP_K)
    tl.store(weights + target, values * scale, mask=places < TOP_K)


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See ``baton_kernels.routing``. Of equal experts the first is chosen."""
    tokens, count = logits.shape
    if count > LARGEST_EXPERTS:
        raise ValueError(f"{count} experts to choose from: at most {LARGEST_EXPERTS}")
    if logits.stride(1) != 1:
        raise ValueError(f"a token's logits must be contiguous, not strided by {logits.stride(1)}")
    if bias is not None and bias.dtype != torch.float32:
        raise ValueError(f"the bias of the choice is {bias.dtype}; allowed: float32")
    mixed = routing.scores == "sparsemixer"  # knows neither a bias nor groups, and its weights are final
    groups = 1 if mixed else routing.groups
    experts = torch.empty((tokens, routing.top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((tokens, routing.top_k), dtype=torch.float32, device=logits.device)
    if tokens:
        rows, members = next_power_of_two(groups), next_power_of_two(count // groups)
        _route[(tokens,)](
            logits,
            weights if bias is None else bias,
            experts,
            weights,
            count if tokens == 1 else logits.stride(0),  # of one row it may be anything
            routing.least_sum,
            1.0 if mixed else routing.scale,
            routing.jitter,
            EXPERTS=count,
            PER_GROUP=count // groups,
            TOP_K=routing.top_k,
            TOP_GROUPS=routing.top_groups,
            GROUP_BEST=routing.group_best,
            SCORES=routing.scores,
            RENORMALIZE=routing.renormalize and not mixed,
            HAS_BIAS=bias is not None and not mixed,
            GROUPS=rows,
            MEMBERS=members,
            PLACES=next_power_of_two(routing.top_k),
            num_warps=max(1, rows * members // SCORES_OF_A_WARP),
            enable_fp_fusion=True,
        )
    return experts, weights
