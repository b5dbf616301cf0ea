"""Choosing each row's next token from its logits.

The choice is a pure function of (logits, parameters, seed, position), where position is the index of the
token among the request's outputs. The rest of the batch does not matter, nor does the order of earlier steps;
a request that is resumed anywhere goes on with the same stream. Penalties, biases and barred tokens are in
the logits already (``baton.engine.sampling.logits``).

Order of the filters, as in transformers: temperature, top-k, top-p over what top-k left, min-p (which vLLM
has before top-k). Each keeps the tokens whose logit reaches a threshold, so the three are one comparison and
equal logits are kept or dropped together (only the mass that top-p counts takes exactly k of them).

The tokens that remain are drawn by a race: a token of weight w arrives at time E / w, with an E of its own
that is exponential of mean 1. The first to arrive is i with probability w_i / sum(w); this is the Gumbel-max
trick without the logarithms. Rounding changes the winner only if the first two arrive as close together as
they are rounded. (To invert the cumulative distribution is no choice: a flat one has a boundary near every
number, and the rounding of logits, which the size of a batch or another device changes, moves all of them.)

First run buckets of adjacent tokens, with the weight of all their tokens, and then the tokens of the bucket
that has won: so there are far fewer random numbers than tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import is_not

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.core.sampling_params import ResolvedSampling
from baton.engine.sampling.philox import exponentials
from baton_kernels.transfers import to_device

BUCKET = 128
"""The number of adjacent token ids that run together first."""
PARTED = 100
"""The least number of greatest values of which a CPU finds the last sooner without finding the others."""
SORTED = 256
"""The number of greatest values from which on sorting all is quicker than selecting them, on a CPU."""


def sample(logits: Tensor, params: Sequence[ResolvedSampling], positions: Sequence[int]) -> list[int]:
    """The next token of each row of ``logits`` ([R, V] float32, any device), for R params and positions. On
    CUDA this changes the logits."""
    tokens: list[int] = choose(logits, params, positions).tolist()
    return tokens


def choose(
    logits: Tensor,
    params: Sequence[ResolvedSampling],
    positions: Sequence[int],
    packer: Packer | None = None,
) -> Tensor:
    """The tokens of :func:`sample` as a tensor, [R] int64: on CUDA one launch, and no wait for it.
    ``packer``: the packer of the rows before."""
    if logits.device.type == "cuda":
        return choose_by_kernel(logits, params, positions, packer)
    drawn = [row for row, p in enumerate(params) if not p.greedy]
    if not drawn:
        return logits.argmax(dim=-1)
    if len(drawn) == len(params):
        return _draw(logits, params, positions)
    tokens = logits.argmax(dim=-1)
    rows = torch.tensor(drawn, device=logits.device)
    tokens[rows] = _draw(logits[rows], [params[i] for i in drawn], [positions[i] for i in drawn])
    return tokens


def choose_by_kernel(
    logits: Tensor,
    params: Sequence[ResolvedSampling],
    positions: Sequence[int],
    packer: Packer | None = None,
) -> Tensor:
    """The tokens of :func:`choose`, for logits on CUDA."""
    from baton_kernels.cuda import sampling  # triton is only there where CUDA is

    return sampling.draw(logits, *packed(params, positions, logits.device, packer))


def packed(
    params: Sequence[ResolvedSampling],
    positions: Sequence[int],
    device: torch.device,
    packer: Packer | None = None,
) -> tuple[Tensor, Tensor]:
    """Settings and seeds in the form that ``baton_kernels.cuda.sampling.draw`` takes, in one copy to the
    device."""
    packer = Packer() if packer is None else packer
    moved = to_device(torch.from_numpy(packer.pack(params, positions)), device)
    return moved[:4].view(torch.float64), moved[4:]


class Packer:
    """Packs the settings of rows and their places in the random sequence. From step to step the rows are
    mostly the same, and only the places change."""

    def __init__(self) -> None:
        self._params: list[ResolvedSampling] = []
        self._columns = np.empty((6, 0), np.int64)

    def pack(self, params: Sequence[ResolvedSampling], positions: Sequence[int]) -> NDArray[np.int64]:
        """Return [6, R] int64: temperature, top-k, top-p and min-p as bits of float64, seed, position. The
        array is the caller's."""
        if len(params) != len(self._params) or any(map(is_not, params, self._params)):
            self._params = list(params)
            self._columns = _columns_of(params)
        columns = self._columns.copy()
        columns[5] = positions
        return columns


def _columns_of(params: Sequence[ResolvedSampling]) -> NDArray[np.int64]:
    columns = np.zeros((6, len(params)), np.int64)
    settings: list[list[float]] = [
        [0.0 if p.greedy else p.temperature for p in params],
        [max(p.top_k, 0) for p in params],
        [p.top_p for p in params],
        [p.min_p for p in params],
    ]
    columns[:4] = np.array(settings, np.float64).view(np.int64)
    seeds = [p.seed & 0xFFFFFFFFFFFFFFFF for p in params]
    columns[4] = np.array(seeds, np.uint64).view(np.int64)
    return columns


def filter_thresholds(scaled: Tensor, params: Sequence[ResolvedSampling]) -> Tensor | None:
    """The least logit that the filters leave to each row: [R, 1], or None when no row filters.

    ``scaled`` [R, V] are logits after temperature. Only rows with a top-p cost a sort, of the vocabulary if
    they have no top-k.
    """
    vocab = scaled.shape[-1]
    k_alone = [row for row, p in enumerate(params) if 0 < p.top_k < vocab and p.top_p >= 1]
    k_and_p = [row for row, p in enumerate(params) if 0 < p.top_k < vocab and p.top_p < 1]
    p_alone = [row for row, p in enumerate(params) if not 0 < p.top_k < vocab and p.top_p < 1]
    with_min_p = any(p.min_p > 0 for p in params)
    if not (k_alone or k_and_p or p_alone or with_min_p):
        return None
    thresholds = scaled.new_full((len(params), 1), -math.inf)
    if k_alone:
        thresholds[k_alone] = _least_of_greatest(scaled[k_alone], [params[row].top_k for row in k_alone])
    if k_and_p:
        keep = [params[row].top_k for row in k_and_p]
        ordered = _greatest(scaled[k_and_p], max(keep))
        thresholds[k_and_p] = _nucleus(ordered, keep, [params[row].top_p for row in k_and_p])
    if p_alone:
        ordered = _greatest(scaled[p_alone], vocab)
        thresholds[p_alone] = _nucleus(
            ordered, [vocab] * len(p_alone), [params[row].top_p for row in p_alone]
        )
    if with_min_p:
        logs = [[math.log(p.min_p) if p.min_p > 0 else -math.inf] for p in params]
        floor = scaled.amax(dim=-1, keepdim=True) + scaled.new_tensor(logs)
        thresholds = torch.maximum(thresholds, floor)
    return thresholds


def _greatest(values: Tensor, count: int) -> Tensor:
    """The ``count`` greatest of each row of ``values`` [R, V], in descending order. [R, count]."""
    if values.device.type != "cpu" or count < SORTED:
        return values.topk(count, dim=-1).values
    # A sort by numpy takes a fifth of the time of torch's, which keeps the places of the values too.
    ascending = torch.from_numpy(np.sort(values.neg().numpy(), axis=-1))
    return ascending[:, :count].neg()


def _least_of_greatest(values: Tensor, counts: list[int]) -> Tensor:
    """The least of the ``counts`` greatest of each row of ``values`` [R, V]. [R, 1]."""
    widest = max(counts)
    if values.device.type != "cpu" or widest < PARTED:
        places = torch.tensor(counts, device=values.device)[:, None] - 1
        return values.topk(widest, dim=-1).values.gather(1, places)
    found = np.empty((len(counts), 1), np.float32)
    negated = values.neg().numpy()
    of_rows = np.array(counts)
    for count in set(counts):
        rows = of_rows == count
        found[rows] = np.partition(negated[rows], count - 1, axis=-1)[:, count - 1 : count]
    return torch.from_numpy(found).neg()


def _nucleus(ordered: Tensor, keep: list[int], top_p: list[float]) -> Tensor:
    """The least of the first ``keep`` values of each descending row of ``ordered`` [r, c] that top-p leaves:
    top-p keeps the values before which less than ``top_p`` of the mass lies, and always the first. [r, 1]."""
    device = ordered.device
    limit = torch.tensor(keep, device=device)[:, None]
    # At 1 the filter is off, also for tokens too rare to move a float64 sum.
    share = torch.tensor([p if p < 1 else math.inf for p in top_p], dtype=torch.float64, device=device)[
        :, None
    ]
    inside = torch.arange(ordered.shape[-1], device=device) < limit
    mass = torch.exp((ordered - ordered[:, :1]).double()).masked_fill_(~inside, 0).cumsum(dim=-1)
    before = torch.nn.functional.pad(mass[:, :-1], (1, 0))
    kept = ((before < share * mass[:, -1:]) & inside).sum(dim=-1, keepdim=True).clamp_(min=1)
    return ordered.gather(1, kept - 1)


def _draw(logits: Tensor, params: Sequence[ResolvedSampling], positions: Sequence[int]) -> Tensor:
    """One draw per row. [R] int64."""
    scaled = logits / logits.new_tensor([p.temperature for p in params])[:, None]
    weights = (scaled - scaled.amax(dim=-1, keepdim=True)).exp_()
    thresholds = filter_thresholds(scaled, params)
    if thresholds is not None:
        weights.masked_fill_(scaled < thresholds, 0)
    return race(weights, [p.seed for p in params], positions)


def race(weights: Tensor, seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
    """One token for each row of ``weights`` [R, V], none negative and one positive: [R] int64. Over all
    seeds, a token has a probability in proportion to its weight, down to 2**-32 of the greatest; lighter
    tokens come too seldom, and under 2**-38 never, as random numbers have 32 bits."""
    rows, vocab = weights.shape
    buckets = torch.nn.functional.pad(weights, (0, -vocab % BUCKET)).view(rows, -1, BUCKET)
    masses = buckets.sum(dim=-1, dtype=torch.float64)
    times = torch.from_numpy(exponentials(seeds, positions, BUCKET + masses.shape[1])).to(weights.device)
    bucket = (masses / times[:, BUCKET:]).argmax(dim=-1)
    tokens = buckets[torch.arange(rows, device=weights.device), bucket]
    return bucket * BUCKET + (tokens / times[:, :BUCKET]).argmax(dim=-1)
