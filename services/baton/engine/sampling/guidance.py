"""Guided decoding: the tokens that may come next, so that an output follows its request's grammar.

A stage on the logits like ``baton.engine.sampling.logits``, and before it. The allowed tokens are a function
of the grammar and the outputs so far: a sequence that was preempted or that goes on elsewhere has its matcher
take its outputs again. The masks of a step are computed when its forward pass has been launched, so that a
GPU works meanwhile, and applied on the device. (On a CPU the pass is over by then. Computing them beside it
on a thread was measured too: it saves no more than the interpreter lock costs, which goes to and fro.) Rows
without guidance cost nothing.

Guidance overrides rules that would leave nothing to choose from: where a grammar is complete, the end of
sequence may come whatever ``min_tokens`` and ``ignore_eos`` say.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.core.sampling_params import ResolvedSampling
from baton.grammar.errors import GrammarError
from baton.grammar.table import Grammar, GrammarMatcher
from baton.grammar.vocabulary import WORD_BITS, GuidedVocabulary, TextRun
from baton.process.exported import counter
from baton_kernels.rows import bar_tokens
from baton_kernels.transfers import to_device, to_host

Words = NDArray[np.int32]
"""A bit mask of tokens, 32 tokens in a word, the lowest bit first; bytes are little endian."""

NOTHING_LEFT = "allowed_token_ids, bad_words and the grammar together leave no token to be generated"


class Guide:
    """Follows one sequence through its grammar."""

    def __init__(self, grammar: Grammar, params: ResolvedSampling, eos_token_ids: Set[int]) -> None:
        self.grammar = grammar
        self._matcher = grammar.matcher()
        self._text_runs = grammar.vocabulary.text_runs
        self._num_words, self._num_text_words = _sizes(grammar.vocabulary)
        self._taken = 0
        self._min_tokens = params.min_tokens
        self._eos = _words(eos_token_ids, self._num_words)
        self._ends = self._eos | _words(params.stop_token_ids, self._num_words)
        self.may_conflict = bool(params.allowed_token_ids or params.bad_word_ids)
        """Whether other rules may bar all that the grammar allows."""

    def mask(self, output_ids: Sequence[int]) -> Words:
        """The mask of tokens that may follow ``output_ids``, which begin with the outputs of the call before.

        GrammarError if the outputs do not follow the grammar, or a limit is met.
        """
        if self._taken < len(output_ids):
            self._matcher.consume_tokens(output_ids[self._taken :])
            self._taken = len(output_ids)
        return self._allowed(self._matcher, self._taken)

    def masks_ahead(self, drafts: Sequence[int]) -> list[Words]:
        """The masks of tokens that may follow the outputs of the last :meth:`mask` with the first of
        ``drafts`` behind them, with the first two, and so on, as far as the grammar accepts them. Changes no
        state."""
        # A copy, which takes 1 us, and no roll-back: a limit met on a path that is never taken must not end
        # the request.
        matcher = self._matcher.copy()
        words: list[Words] = []
        for taken, token in enumerate(drafts, start=self._taken + 1):
            if not matcher.try_consume_tokens([token]):
                break
            try:
                words.append(self._allowed(matcher, taken))
            except GrammarError:
                break
        return words

    def _allowed(self, matcher: GrammarMatcher, taken: int) -> Words:
        both = np.empty(self._num_words + self._num_text_words, np.int32)
        matcher.compute_mask(both.ctypes.data, both.nbytes)
        words = _folded(both, self._num_words, self._text_runs)
        if not (words & self._eos).any():
            return words
        if taken < self._min_tokens and (words & ~self._ends).any():
            return words & ~self._ends
        # Where the grammar may end, a stop token ends it as well as the model's own.
        return words | self._ends


class GuidedRow(NamedTuple):
    """A row of the logits with a grammar."""

    at: int
    """The row's index in the logits."""
    guide: Guide
    output_ids: Sequence[int]
    drafts: Sequence[int] = ()
    """Drafts of the tokens behind the outputs; the rows behind this one are for what may follow the
    drafts."""


@dataclass(frozen=True, slots=True)
class StepMasks:
    """The masks of one step."""

    rows: Sequence[GuidedRow] = ()
    """Rows that have a mask; a draft's is a row of its own."""
    words: Words = field(default_factory=lambda: np.empty((0, 0), np.int32))
    """The masks of ``rows``: [len(rows), W]."""
    errors: dict[int, str] = field(default_factory=dict)
    """Row → why it has no mask. The logits of such a row mean nothing."""
    best: list[tuple[list[int], Tensor]] = field(default_factory=list)
    """Rows, and their greatest logits under all rules, on their way to the host."""

    def apply(self, logits: Tensor) -> None:
        """Bars the tokens that the grammars do not allow in ``logits`` ([R, V] float32, any device), in
        place."""
        if not self.rows:
            return
        at = to_device(torch.tensor([row.at for row in self.rows]), logits.device)
        bar_tokens(logits, at, to_device(torch.from_numpy(self.words), logits.device))

    def find_conflicts(self, logits: Tensor) -> None:
        """Looks for rows in which other rules have barred all that was left, for ``all_errors``."""
        rows = [row.at for row in self.rows if row.guide.may_conflict]
        if rows:
            at = to_device(torch.tensor(rows), logits.device)
            self.best.append((rows, to_host(logits[at].amax(dim=-1))))

    def all_errors(self) -> dict[int, str]:
        """Row → why it can have no token. The device is done with the logits."""
        barred = (
            row
            for rows, best in self.best
            for row, value in zip(rows, best.tolist(), strict=True)
            if value == -math.inf
        )
        return self.errors | dict.fromkeys(barred, NOTHING_LEFT)


@dataclass(frozen=True, slots=True)
class MaskStats:
    """The cost of masks to an engine so far."""

    steps: Annotated[int, counter("baton_guided_steps", "Steps with guided sequences.")] = 0
    masks: Annotated[int, counter("baton_guided_masks", "Masks computed, one for a token.")] = 0
    seconds: Annotated[float, counter("baton_guided_mask_seconds", "Time for computing masks.")] = 0.0


class MaskStage:
    """Computes the masks of each step, and measures their cost."""

    def __init__(self) -> None:
        self.stats = MaskStats()
        """The cost so far. Replaced, never changed: any thread may read it."""

    def masks(self, rows: Sequence[GuidedRow]) -> StepMasks:
        """The masks of a step's ``rows``. To be called when the forward pass has been launched."""
        if not rows:
            return StepMasks()
        began = time.perf_counter()
        masks = masks_of(rows)
        seconds = time.perf_counter() - began
        stats = self.stats
        self.stats = MaskStats(stats.steps + 1, stats.masks + len(masks.rows), stats.seconds + seconds)
        return masks


def masks_of(rows: Sequence[GuidedRow]) -> StepMasks:
    """The masks of ``rows``, one after the other."""
    masked: list[GuidedRow] = []
    words: list[Words] = []
    errors: dict[int, str] = {}
    for row in rows:
        try:
            first = row.guide.mask(row.output_ids)
        except GrammarError as error:
            errors[row.at] = f"structured output: {error}"
            continue
        own = [first, *row.guide.masks_ahead(row.drafts)] if row.drafts else [first]
        words += own
        masked += [row._replace(at=row.at + ahead) for ahead in range(len(own))]
    return StepMasks(masked, np.stack(words), errors) if masked else StepMasks(errors=errors)


def _sizes(vocabulary: GuidedVocabulary) -> tuple[int, int]:
    """Return how many words of a mask hold the model's tokens, and how many hold text ids behind them."""
    ids, text_ids = vocabulary.vocab_size, len(vocabulary.text_ids)
    return -(-ids // WORD_BITS), -(-text_ids // WORD_BITS)


def _folded(words: Words, num_words: int, runs: Sequence[TextRun]) -> Words:
    """Return the first ``num_words`` of a mask, with the tokens whose text id is allowed."""
    own, texts = words[:num_words], int.from_bytes(words[num_words:].tobytes(), "little")
    if texts:
        for run in runs:
            at, shift = divmod(run.first, WORD_BITS)
            bits = texts >> (run.text_id - num_words * WORD_BITS) & ((1 << run.size) - 1)
            size = -(-(shift + run.size) // WORD_BITS)
            own[at : at + size] |= np.frombuffer((bits << shift).to_bytes(4 * size, "little"), np.int32)
    return own


def _words(token_ids: Set[int], num_words: int) -> Words:
    words = np.zeros(num_words, np.uint32)
    for token in token_ids:
        if token < 32 * num_words:
            words[token // 32] |= np.uint32(1 << token % 32)
    return words.view(np.int32)
