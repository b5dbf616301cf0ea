"""The choice of a step's tokens: launched when the tokens before them are known, read when the device is
done."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple

import torch
from torch import Tensor

from baton.core.sampling_params import ResolvedSampling
from baton.engine.execution import Sampled, StepResult
from baton.engine.sampling.beams import Candidates
from baton.engine.sampling.guidance import GuidedRow, MaskStage, StepMasks
from baton.engine.sampling.logits import Row, adjust
from baton.engine.sampling.logprobs import TokenScores, begin_score
from baton.engine.sampling.sampler import Packer, choose
from baton.engine.sequence import Sequence
from baton_kernels.transfers import to_device, to_host


class Draws(NamedTuple):
    """The tokens to be chosen."""

    rows: list[int]
    """Each one's row: the place of its sequence among the sequences that are due."""
    params: list[ResolvedSampling]
    positions: list[int]
    """The number of outputs before each."""
    given: dict[int, int]
    """The tokens that were chosen before, by their place among the draws."""
    plain: bool
    """Whether every sequence gets one token."""

    def places(self, due: Items[Sequence]) -> dict[Sequence, int]:
        """Return the place of each sequence's own token among the draws."""
        if self.plain:
            return dict(zip(due, self.rows, strict=True))
        return {due[row]: at for at, row in reversed(list(enumerate(self.rows)))}


def draws_of(due: Items[Sequence]) -> Draws:
    """The choices to make after each sequence: one token, and at its first output one for each of its forks.
    Nothing after a beam."""
    if not any(seq.num_candidates or seq.forks for seq in due):
        params, positions = [seq.params for seq in due], [len(seq.output_ids) for seq in due]
        return Draws(list(range(len(due))), params, positions, {}, True)
    draws = Draws([], [], [], {}, False)
    for row, seq in enumerate(due):
        if seq.num_candidates:
            continue
        branches = seq.forks if not seq.output_ids else ()
        answers = [(seq.params, seq.first_token if branches else None)]
        answers += [(fork.params, fork.first_token) for fork in branches]
        for asked, token in answers:
            if token is not None:
                draws.given[len(draws.rows)] = token
            draws.rows.append(row)
            draws.params.append(asked)
            draws.positions.append(len(seq.output_ids))
    return draws


class TokenChoice:
    """The tokens that follow the sequences ``due``, by their rows of ``logits`` [R, V], which this changes.

    All outputs of the sequences are known. Nothing here waits for the device before :meth:`read`.
    """

    def __init__(
        self, due: tuple[Sequence, ...], logits: Tensor, stage: MaskStage, packer: Packer | None = None
    ) -> None:
        self._due = due
        self._beams = _likeliest(logits, due)
        self._draws = draws_of(due)
        self.tokens: Tensor | None = None
        """[D] int64: the tokens on the device, in the order of the draws. None: there are none."""
        self._masks = StepMasks()
        self._scores: TokenScores | None = None
        self._telling = [at for at, params in enumerate(self._draws.params) if params.logprobs is not None]
        if self._draws.rows:
            self._masks = stage.masks(
                [GuidedRow(i, s.guide, s.output_ids) for i, s in enumerate(due) if s.guide is not None]
            )
            self.tokens = self._launch(logits, packer)
            self._on_host = to_host(self.tokens)

    @property
    def places(self) -> dict[Sequence, int]:
        """The place of each sequence's own token among ``tokens``."""
        return self._draws.places(self._due)

    def _launch(self, logits: Tensor, packer: Packer | None) -> Tensor:
        due, draws, telling = self._due, self._draws, self._telling
        raw = logits[_ids([draws.rows[at] for at in telling], logits)] if telling else None
        self._masks.apply(logits)
        adjust(logits, [Row(i, s.rules, s.token_ids) for i, s in enumerate(due) if s.rules is not None])
        self._masks.find_conflicts(logits)
        if not draws.plain:
            logits = logits[_ids(draws.rows, logits)]
        tokens = choose(logits, draws.params, draws.positions, packer)
        if draws.given:
            tokens[_ids(list(draws.given), logits)] = _ids(list(draws.given.values()), logits)
        if raw is not None:
            most = max(draws.params[at].logprobs or 0 for at in telling)
            every = len(telling) == len(draws.rows)
            self._scores = begin_score(raw, tokens if every else tokens[_ids(telling, logits)], most)
        return tokens

    def read(self, result: StepResult) -> None:
        """Add the tokens to ``result``. The device is done with them."""
        for seq, top_ids, top in self._beams:
            result.candidates[seq] = Candidates(top_ids.tolist(), top.tolist())
        if self.tokens is None:
            return
        tokens: list[int] = self._on_host.tolist()
        if self._scores is None and self._draws.plain:
            result.tokens.update(
                (seq, [Sampled(token, None)]) for seq, token in zip(self._due, tokens, strict=True)
            )
        else:
            self._read_all(tokens, result)
        for row, error in self._masks.all_errors().items():
            result.errors[self._due[row]] = error
            del result.tokens[self._due[row]]

    def _read_all(self, tokens: list[int], result: StepResult) -> None:
        told = {}
        if self._scores is not None:
            num_tops = [self._draws.params[at].logprobs or 0 for at in self._telling]
            told = dict(zip(self._telling, self._scores.read_each(num_tops), strict=True))
        for at, (row, token) in enumerate(zip(self._draws.rows, tokens, strict=True)):
            result.tokens.setdefault(self._due[row], []).append(Sampled(token, told.get(at)))


def _ids(numbers: list[int], beside: Tensor) -> Tensor:
    """Return [N] int64 on the device of ``beside``."""
    return to_device(torch.tensor(numbers), beside.device)


def _likeliest(logits: Tensor, due: tuple[Sequence, ...]) -> list[tuple[Sequence, Tensor, Tensor]]:
    """The likeliest tokens after the beams among those due, by their rows of ``logits``, and their
    log-probabilities."""
    by_count: dict[int, list[int]] = {}
    for row, seq in enumerate(due):
        if seq.num_candidates:
            by_count.setdefault(seq.num_candidates, []).append(row)
    found = []
    # Each count by itself: the order of equal tokens must not depend on the rest of the batch.
    for count, rows in by_count.items():
        width = min(count, logits.shape[-1])
        top = logits[_ids(rows, logits)].log_softmax(dim=-1).topk(width, dim=-1)
        ids, values = to_host(top.indices), to_host(top.values)
        found += [(due[row], ids[at], values[at]) for at, row in enumerate(rows)]
    return found
