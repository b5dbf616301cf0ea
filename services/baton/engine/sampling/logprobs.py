"""Log-probabilities of tokens, from the logits as the model gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from baton.core.logprobs import Logprobs
from baton_kernels.transfers import to_device, to_host


class TokenScores(NamedTuple):
    """The log-probabilities of R tokens, on their way to the host."""

    num_top: int
    chosen: Tensor
    """[R] float32."""
    ranks: Tensor
    """[R] int64."""
    top_ids: Tensor
    """[R, num_top] int64."""
    top: Tensor
    """[R, num_top] float32."""

    def read(self) -> Logprobs:
        """Return them; the stream that computed them has come so far."""
        return Logprobs(
            self.num_top,
            self.chosen.tolist(),
            self.ranks.tolist(),
            self.top_ids.flatten().tolist(),
            self.top.flatten().tolist(),
        )

    def read_each(self, num_tops: Sequence[int]) -> list[Logprobs]:
        """Return those of rows of different requests: one for each, with its own ``num_top``."""
        whole = self.read()
        return [whole[row : row + 1].narrowed(num_top) for row, num_top in enumerate(num_tops)]


def begin_score(logits: Tensor, tokens: Tensor, num_top: int) -> TokenScores:
    """Launches :func:`score` for ``tokens`` [R] int64, on the device of ``logits``."""
    num_top = min(num_top, logits.shape[-1])
    chosen = logits.gather(1, tokens[:, None])
    ranks = (logits > chosen).sum(dim=-1) + 1
    mass = logits.logsumexp(dim=-1, keepdim=True)
    top = logits.topk(num_top, dim=-1)
    parts = ((chosen - mass)[:, 0], ranks, top.indices, top.values - mass)
    return TokenScores(num_top, *(to_host(part) for part in parts))


def score(logits: Tensor, token_ids: Sequence[int], num_top: int) -> Logprobs:
    """The log-probabilities of ``token_ids``, each by its row of ``logits`` [R, V], with the
    log-probabilities of each row's ``num_top`` likeliest tokens. Equal logits share the better rank."""
    scores = begin_score(logits, to_device(torch.tensor(token_ids), logits.device), num_top)
    if logits.device.type == "cuda":
        torch.cuda.current_stream(logits.device).synchronize()
    return scores.read()


def score_each(logits: Tensor, token_ids: Sequence[int], num_tops: Sequence[int]) -> list[Logprobs]:
    """The results of :func:`score` for rows of different requests: one for each, with its own ``num_top``."""
    whole = score(logits, token_ids, max(num_tops))
    return [whole[row : row + 1].narrowed(num_top) for row, num_top in enumerate(num_tops)]
