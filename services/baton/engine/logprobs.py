"""Log-probabilities of tokens, from the logits as the model gives them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.logprobs import Logprobs


def score(logits: Tensor, token_ids: Sequence[int], num_top: int) -> Logprobs:
    """The log-probabilities of ``token_ids``, each by its row of ``logits`` [R, V], with those of each row's
    ``num_top`` likeliest tokens. Equal logits share the better rank."""
    num_top = min(num_top, logits.shape[-1])
    chosen = logits.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])
    ranks = (logits > chosen).sum(dim=-1) + 1
    mass = logits.logsumexp(dim=-1, keepdim=True)
    top = logits.topk(num_top, dim=-1)
    return Logprobs(
        num_top,
        (chosen - mass)[:, 0].tolist(),
        ranks.tolist(),
        top.indices.flatten().tolist(),
        (top.values - mass).flatten().tolist(),
    )


def score_each(logits: Tensor, token_ids: Sequence[int], num_tops: Sequence[int]) -> list[Logprobs]:
    """As :func:`score`, for rows of different requests: one result for each, with its own ``num_top``."""
    whole = score(logits, token_ids, max(num_tops))
    return [whole[row : row + 1].narrowed(num_top) for row, num_top in enumerate(num_tops)]
