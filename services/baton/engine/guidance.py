"""Guided decoding: the tokens that may come next, so that an output follows its request's grammar.

A stage on the logits like ``baton.engine.logits``, and before it. What may come next is a function of the
grammar and the outputs so far: a sequence that was preempted or that goes on elsewhere has its matcher take
its outputs again. The masks of a step are computed when its forward pass has been launched, so that a GPU
works meanwhile, and applied on the device. (On a CPU the pass is over by then. Computing them beside it on a
thread was measured too: what that saves goes into passing the interpreter lock to and fro.) Rows without
guidance cost nothing.

Guidance goes before what would leave nothing to choose from: where a grammar is complete, the end of sequence
may come whatever ``min_tokens`` and ``ignore_eos`` say.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from llguidance import LLMatcher
from numpy.typing import NDArray
from torch import Tensor

from baton.grammar.compiler import Grammar
from baton.grammar.errors import GrammarError
from baton.grammar.table import raise_error
from baton.sampling_params import SamplingParams
from baton.telemetry.grammar import MaskStats
from baton_kernels.rows import bar_tokens

Words = NDArray[np.int32]
"""A bit for each token, those of 32 tokens in a word, the lowest first; bytes are little endian."""

NOTHING_LEFT = "allowed_token_ids, bad_words and the grammar together leave no token to be generated"


class Guide:
    """Follows one sequence through its grammar."""

    def __init__(self, grammar: Grammar, params: SamplingParams, eos_token_ids: Set[int]) -> None:
        self.grammar = grammar
        self._matcher: LLMatcher = grammar.matcher()
        self._num_words = -(-grammar.vocab_size // 32)
        self._taken = 0
        self._min_tokens = params.min_tokens
        self._eos = _words(eos_token_ids, self._num_words)
        self._ends = self._eos | _words(params.stop_token_ids, self._num_words)
        self.may_conflict = bool(params.allowed_token_ids or params.bad_word_ids)
        """Other rules may bar all that the grammar allows."""

    def mask(self, output_ids: Sequence[int]) -> Words:
        """The tokens that may follow ``output_ids``, which begin with those of the call before.

        GrammarError if the outputs do not follow the grammar, or a limit is met.
        """
        if self._taken < len(output_ids):
            self._matcher.consume_tokens(list(output_ids[self._taken :]))
            self._taken = len(output_ids)
        return self._allowed(self._matcher, self._taken)

    def masks_ahead(self, drafts: Sequence[int]) -> list[Words]:
        """The tokens that may follow the outputs of the last :meth:`mask` with the first of ``drafts`` behind
        them, with the first two, and so on, as far as the grammar takes them. Leaves no trace."""
        # A copy, which takes 1 us, and no roll-back: a limit met on a way that is never taken must not end
        # the request.
        matcher = self._matcher.deep_copy()
        words: list[Words] = []
        for taken, token in enumerate(drafts, start=self._taken + 1):
            if not matcher.try_consume_tokens([token]):
                break
            try:
                words.append(self._allowed(matcher, taken))
            except GrammarError:
                break
        return words

    def _allowed(self, matcher: LLMatcher, taken: int) -> Words:
        words = np.empty(self._num_words, np.int32)
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        raise_error(matcher)
        if not (words & self._eos).any():
            return words
        if taken < self._min_tokens and (words & ~self._ends).any():
            return words & ~self._ends
        # Where the grammar may end, a stop token ends it as well as the model's own.
        return words | self._ends


class GuidedRow(NamedTuple):
    """A row of the logits with a grammar."""

    at: int
    """Its index."""
    guide: Guide
    output_ids: Sequence[int]
    drafts: Sequence[int] = ()
    """What may follow the outputs; the rows behind this one are for what may follow the drafts."""


@dataclass(frozen=True, slots=True)
class StepMasks:
    """The masks of one step."""

    rows: Sequence[GuidedRow] = ()
    """Those that have one, a draft's as a row of its own."""
    words: Words = field(default_factory=lambda: np.empty((0, 0), np.int32))
    """[len(rows), W]."""
    errors: dict[int, str] = field(default_factory=dict)
    """Row → why there is none. Their logits say nothing."""

    def apply(self, logits: Tensor) -> None:
        """Bars what the grammars do not allow in ``logits`` ([R, V] float32, any device), in place."""
        if not self.rows:
            return
        at = torch.tensor([row.at for row in self.rows], device=logits.device)
        bar_tokens(logits, at, torch.from_numpy(self.words).to(logits.device))

    def find_conflicts(self, logits: Tensor) -> None:
        """Adds to ``errors`` the rows in which other rules have barred all that was left."""
        rows = [row.at for row in self.rows if row.guide.may_conflict]
        if rows:
            best = logits[torch.tensor(rows, device=logits.device)].amax(dim=-1).tolist()
            barred = (row for row, value in zip(rows, best, strict=True) if value == -math.inf)
            self.errors.update(dict.fromkeys(barred, NOTHING_LEFT))


class MaskStage:
    """Computes the masks of each step, and knows what they have cost."""

    def __init__(self) -> None:
        self.stats = MaskStats()
        """Replaced, never changed: any thread may read it."""

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


def _words(token_ids: Set[int], num_words: int) -> Words:
    words = np.zeros(num_words, np.uint32)
    for token in token_ids:
        if token < 32 * num_words:
            words[token // 32] |= np.uint32(1 << token % 32)
    return words.view(np.int32)
