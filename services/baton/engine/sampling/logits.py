"""The changes that requests ask to be made to their logits before the sampler sees them.

The order is that of vLLM's sampler (v1): allowed_token_ids, bad_words, min_tokens, logit_bias, then the
repetition, the frequency and the presence penalty. Temperature and filters follow, in
``baton.engine.sampling.sampler``. transformers has some of these, with the same effect, except that it seeks
bad words in the prompt too: here, as in vLLM, a bad word's tokens must all be output. The repetition penalty
counts prompt and output, the other two the output alone.

All of it is a function of parameters and tokens. A request that was preempted or that goes on elsewhere is
counted again from its tokens.

The cost grows with the tokens that a request names or has seen, never with the vocabulary, and every
operation is one for all rows. Rows without rules cost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from concurrent.futures import Future
from copy import copy
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.core.sampling_params import ResolvedSampling
from baton.engine.sampling.bad_words import BadWords, Ids
from baton_kernels.rows import bar_tokens
from baton_kernels.transfers import to_device


class TokenCounts:
    """The distinct tokens of a request in the order they came, and how often each was output."""

    def __init__(self, prompt_ids: Iterable[int], num_prompt: int) -> None:
        """``prompt_ids`` are counted as seen but not output; output begins at ``num_prompt``."""
        self._seen = {token: at for at, token in enumerate(dict.fromkeys(prompt_ids))}
        """The places of the prompt's tokens. Forks share it."""
        self._new: dict[int, int] = {}
        """The places of the other tokens."""
        self._ids: Ids = np.array(list(self._seen), np.int64)
        self._outputs = np.zeros(len(self._seen), np.float32)
        """Ids and outputs are as long as there is memory for; the first ``_used`` of each count."""
        self._used = len(self._seen)
        self._counted = num_prompt

    def fork(self) -> TokenCounts:
        """The counts of another answer to the prompt, while nothing is output."""
        child = copy(self)
        child._new = {}
        child._ids, child._outputs = self._ids.copy(), self._outputs.copy()
        return child

    def count(self, token_ids: Sequence[int], num_drafts: int = 0) -> tuple[Ids, NDArray[np.float32]]:
        """The tokens and their counts, once the tokens of ``token_ids`` since the last call are counted; they
        hold until the next call. The last ``num_drafts`` of ``token_ids`` are in the result, and not counted
        for the next call."""
        stop = len(token_ids) - num_drafts
        for token in token_ids[self._counted : stop]:
            at = self._place(token)  # which may replace the counts
            self._outputs[at] += 1
        self._counted = stop
        ids, outputs = self._ids[: self._used], self._outputs[: self._used]
        return self._with(ids, outputs, token_ids[stop:]) if num_drafts else (ids, outputs)

    def _place(self, token: int) -> int:
        """The place of a token, the next free one if it is new."""
        at = self._seen.get(token)
        if at is None:
            at = self._new.setdefault(token, self._used)
        if at == self._used:
            if at == len(self._ids):
                self._ids = np.resize(self._ids, max(16, 2 * at))
                self._outputs = np.append(self._outputs, np.zeros(len(self._ids) - at, np.float32))
            self._ids[at] = token
            self._used += 1
        return at

    def _with(
        self, ids: Ids, outputs: NDArray[np.float32], drafts: Iterable[int]
    ) -> tuple[Ids, NDArray[np.float32]]:
        """Counts ``drafts`` in copies."""
        fresh: dict[int, int] = {}
        outputs = outputs.copy()
        for token in drafts:
            at = self._seen.get(token, self._new.get(token))
            if at is None:
                fresh[token] = fresh.get(token, 0) + 1
            else:
                outputs[at] += 1
        ids = np.append(ids, np.array(list(fresh), np.int64))
        outputs = np.append(outputs, np.array(list(fresh.values()), np.float32))
        return ids, outputs


class AllowedTokens:
    """The tokens that a request allows, in the forms in which steps bar the others. Shared by its answers."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = np.array(ids, np.int64)
        self.forbidden = torch.ones(max(ids) + 1, dtype=torch.bool)
        """A mask of the tokens up to the greatest allowed one: [greatest + 1]. Those behind it are forbidden
        too."""
        self.forbidden[torch.from_numpy(self._ids)] = False
        self._words: NDArray[np.int32] = np.empty(0, np.int32)

    def words(self, vocab: int) -> NDArray[np.int32]:
        """A mask in the form that ``baton_kernels.rows.bar_tokens`` takes. [W]; nobody may change it."""
        if len(self._words) != -(-vocab // 32):
            self._words = allowed_words(self._ids, vocab)
        return self._words


class LogitRules:
    """The changes of one request's parameters to its logits, prepared for use at every step."""

    def __init__(
        self,
        params: ResolvedSampling,
        prompt_ids: Sequence[int],
        eos_token_ids: Set[int],
        bad_words: Future[BadWords] | None = None,
    ) -> None:
        """``bad_words``: those of ``params``, done before the first step. None: they are prepared here."""
        self.params = params
        self.allowed = AllowedTokens(params.allowed_token_ids) if params.allowed_token_ids else None
        self.biased: Ids = np.array([token for token, _ in params.logit_bias], np.int64)
        self.bias = np.array([bias for _, bias in params.logit_bias], np.float32)
        self._num_prompt = len(prompt_ids)
        self._ends: Ids = np.array(sorted(params.stop_token_ids | eos_token_ids), np.int64)
        self.bad_words = bad_words or _done(BadWords(params.bad_word_ids))
        self._state = 0
        self._followed = -1
        """The outputs that have led to the state; -1: it was not asked for yet."""
        seen = prompt_ids if params.repetition_penalty != 1 else ()
        self._counts = TokenCounts(seen, self._num_prompt)

    @classmethod
    def of(
        cls,
        params: ResolvedSampling,
        prompt_ids: Sequence[int],
        eos_token_ids: Set[int],
        bad_words: Future[BadWords] | None = None,
    ) -> LogitRules | None:
        """The rules of ``params``; None for parameters that leave the logits as they are."""
        return cls(params, prompt_ids, eos_token_ids, bad_words) if params.shapes_logits else None

    def fork(self) -> LogitRules:
        """The rules of another answer to the same prompt, with the same parameters but for the seed, before
        its first output. Shares everything that steps do not change."""
        child = copy(self)
        child._state, child._followed = 0, -1
        child._counts = self._counts.fork()
        return child

    def barred(self, token_ids: Sequence[int], num_drafts: int = 0) -> Ids:
        """Tokens that must not follow ``token_ids`` (prompt and outputs), of which the last ``num_drafts``
        are assumed outputs."""
        num_outputs = len(token_ids) - self._num_prompt
        barred = self._barred_words(token_ids, num_outputs - num_drafts)
        if num_outputs < self.params.min_tokens:
            return np.concatenate([barred, self._ends])
        return barred

    def _barred_words(self, token_ids: Sequence[int], num_known: int) -> Ids:
        """Takes the ``num_known`` outputs into the state. Those behind them are drafts."""
        words, known = self.bad_words.result(), self._num_prompt + num_known
        if 0 <= self._followed <= num_known:
            self._state = words.follow(self._state, token_ids[self._num_prompt + self._followed : known])
        else:
            self._state = words.start(token_ids[self._num_prompt : known])
        self._followed = num_known
        return words.barred(words.follow(self._state, token_ids[known:]))

    def counts(self, token_ids: Sequence[int], num_drafts: int = 0) -> tuple[Ids, NDArray[np.float32]]:
        """The tokens to penalize after ``token_ids``, and how often each was output. The last ``num_drafts``
        of ``token_ids`` are assumed outputs."""
        return self._counts.count(token_ids, num_drafts)


def _done(bad_words: BadWords) -> Future[BadWords]:
    future: Future[BadWords] = Future()
    future.set_result(bad_words)
    return future


class Row(NamedTuple):
    """A row of the logits with rules."""

    at: int
    """The row's index in the logits."""
    rules: LogitRules
    token_ids: Sequence[int]
    """Prompt and outputs so far."""
    num_drafts: int = 0
    """The number of last tokens that are assumed, and may never be outputs."""


def adjust(logits: Tensor, rows: Sequence[Row]) -> None:
    """Applies the rules of ``rows`` to ``logits`` ([R, V] float32, any device), in place."""
    if rows and logits.device.type == "cuda":
        adjust_by_kernels(logits, rows)
    elif rows:
        _keep_allowed(logits, rows)
        _bar(logits, rows)
        _add_bias(logits, [row for row in rows if len(row.rules.biased)])
        _penalize(logits, [row for row in rows if row.rules.params.penalizes])


class PackedRules(NamedTuple):
    """The rules of some rows about single tokens, in the form that ``baton_kernels.cuda.logits.adjust``
    takes."""

    rows: Tensor
    starts: Tensor
    penalties: Tensor
    ids: Tensor
    values: Tensor

    @classmethod
    def of(cls, rows: Sequence[Row], device: torch.device) -> PackedRules:
        """Packs the rules of ``rows``, in one copy to the device."""
        ids: list[Ids] = []
        values: list[NDArray[np.float32]] = []
        for row in rows:
            barred = row.rules.barred(row.token_ids, row.num_drafts)
            seen, outputs = np.empty(0, np.int64), _NO_VALUES
            if row.rules.params.penalizes:
                seen, outputs = row.rules.counts(row.token_ids, row.num_drafts)
            ids += [barred, row.rules.biased, seen]
            values += [np.zeros(len(barred), np.float32), row.rules.bias, outputs]
        starts = np.cumsum([0, *map(len, ids)])
        params = [row.rules.params for row in rows]
        penalties = np.array(
            [[p.repetition_penalty, p.frequency_penalty, p.presence_penalty] for p in params], np.float32
        )
        parts = [
            np.array([row.at for row in rows], np.int32),
            starts.astype(np.int32),
            penalties.T.ravel().view(np.int32),
            np.concatenate(ids).astype(np.int32),
            np.concatenate(values).view(np.int32),
        ]
        moved = to_device(torch.from_numpy(np.concatenate(parts)), device)
        at, begin, factors, tokens, numbers = moved.split_with_sizes([len(part) for part in parts])
        factors = factors.view(torch.float32).view(3, len(rows))
        return cls(at, begin, factors, tokens, numbers.view(torch.float32))


_NO_VALUES = np.empty(0, np.float32)


def allowed_words(allowed: Ids, vocab: int) -> NDArray[np.int32]:
    """A mask of ``allowed`` in the form that ``baton_kernels.rows.bar_tokens`` takes. [W]."""
    bits = np.zeros(-(-vocab // 32) * 32, np.uint8)
    bits[allowed] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def adjust_by_kernels(logits: Tensor, rows: Sequence[Row]) -> None:
    """Does what :func:`adjust` does, for logits on CUDA: a launch for rules that allow few tokens only, one
    for the rest."""
    from baton_kernels.cuda import logits as kernels  # triton is only there where CUDA is

    device = logits.device
    few = [(row.at, row.rules.allowed) for row in rows if row.rules.allowed is not None]
    if few:
        words = np.stack([allowed.words(logits.shape[1]) for _, allowed in few])
        bar_tokens(
            logits,
            to_device(torch.tensor([at for at, _ in few]), device),
            to_device(torch.from_numpy(words), device),
        )
    kernels.adjust(logits, *PackedRules.of(rows, device))


def _keep_allowed(logits: Tensor, rows: Sequence[Row]) -> None:
    for row in rows:
        if row.rules.allowed is not None:
            forbidden = row.rules.allowed.forbidden
            logits[row.at, : len(forbidden)].masked_fill_(forbidden, -math.inf)
            logits[row.at, len(forbidden) :] = -math.inf


def _bar(logits: Tensor, rows: Sequence[Row]) -> None:
    values = logits.numpy()  # numpy takes a third of torch's time for a thousand tokens
    for row in rows:
        barred = row.rules.barred(row.token_ids, row.num_drafts)
        if len(barred):
            values[row.at, barred] = -math.inf


def _add_bias(logits: Tensor, rows: Sequence[Row]) -> None:
    if not rows:
        return
    at = _places(logits, rows, [row.rules.biased for row in rows])
    bias = np.concatenate([row.rules.bias for row in rows])
    logits[at] += torch.from_numpy(bias).to(logits.device)


def _penalize(logits: Tensor, rows: Sequence[Row]) -> None:
    if not rows:
        return
    counts = [row.rules.counts(row.token_ids, row.num_drafts) for row in rows]
    at = _places(logits, rows, [ids for ids, _ in counts])
    params = [row.rules.params for row in rows]
    factors = np.array(
        [[p.repetition_penalty, p.frequency_penalty, p.presence_penalty] for p in params], np.float32
    )
    columns = np.concatenate(
        [
            np.concatenate([outputs for _, outputs in counts])[None],
            np.repeat(factors, [len(ids) for ids, _ in counts], axis=0).T,
        ]
    )
    outputs, repetition, frequency, presence = torch.from_numpy(columns).to(logits.device)
    chosen = logits[at]
    chosen = torch.where(chosen > 0, chosen / repetition, chosen * repetition)
    chosen -= frequency * outputs
    chosen -= presence * (outputs > 0)
    logits[at] = chosen


def _places(logits: Tensor, rows: Sequence[Row], ids: Sequence[Ids]) -> tuple[Tensor, Tensor]:
    """The index of ``ids[i]`` in row ``rows[i].at``, for all i: (rows, columns), in one copy to the
    device."""
    indices = np.repeat([row.at for row in rows], [len(part) for part in ids])
    placed = torch.from_numpy(np.stack([indices, np.concatenate(ids)])).to(logits.device)
    return placed[0], placed[1]
