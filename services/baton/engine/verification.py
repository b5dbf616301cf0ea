"""Verification of drafts: which are the tokens that the sequence would have got anyway.

The sampler's choice is a pure function of (logits, parameters, seed, position), so a draft can be compared
with the very token that a plain step would choose. The last token and its k drafts are computed in one step;
after each of these k + 1 tokens the sampler chooses, under the rules and the grammar of the tokens up to
there; a draft is accepted while it is the chosen token. The choice after the last accepted draft is a token
as well: every verification yields at least one.

So the output is that of a run without drafts, token by token, for any seed and any drafter. The chance that a
draft d is accepted is p(d), the target's own probability of it: as high as rejection sampling
(https://arxiv.org/abs/2211.17192, https://arxiv.org/abs/2302.01318) makes it for a draft that was not drawn
but given, min(1, p(d) / 1).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Set
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from baton.core.logprobs import Logprobs
from baton.engine.execution import Sampled
from baton.engine.sampling.guidance import GuidedRow, MaskStage
from baton.engine.sampling.logits import Row, adjust
from baton.engine.sampling.logprobs import score_each
from baton.engine.sampling.sampler import sample
from baton.engine.sequence import Sequence


class Drafted(NamedTuple):
    """A sequence, and drafts behind its last token."""

    sequence: Sequence
    drafts: Items[int]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The tokens that follow the sequences that had drafts."""

    tokens: dict[Sequence, list[Sampled]] = field(default_factory=dict)
    """The accepted drafts and one token more, of each sequence."""
    errors: dict[Sequence, str] = field(default_factory=dict)
    """The reason for each sequence that gets no token."""


def verify(logits: Tensor, drafted: Items[Drafted], stage: MaskStage) -> Verdict:
    """Verifies the drafts of ``drafted`` against ``logits`` [R, V] float32, which this changes. The rows are
    in the order of ``drafted``: for each sequence one for its last token and one for each draft."""
    # The tokens before each row.
    places = [Drafted(seq, drafts[:count]) for seq, drafts in drafted for count in range(len(drafts) + 1)]
    starts = list(accumulate((len(drafts) + 1 for _, drafts in drafted), initial=0))
    telling = [at for at, (seq, _) in enumerate(places) if seq.params.logprobs is not None]
    raw = logits[telling] if telling else None
    masks = stage.masks(
        [
            GuidedRow(start, seq.guide, seq.output_ids, drafts)
            for start, (seq, drafts) in zip(starts, drafted, strict=False)
            if seq.guide is not None
        ]
    )
    masks.apply(logits)
    adjust(
        logits,
        [
            Row(at, seq.rules, seq.token_ids + array("q", drafts), len(drafts))
            for at, (seq, drafts) in enumerate(places)
            if seq.rules is not None
        ],
    )
    masks.find_conflicts(logits)
    chosen = sample(
        logits, [seq.params for seq, _ in places], [seq.num_outputs + len(drafts) for seq, drafts in places]
    )
    errors = masks.all_errors()
    told: dict[int, Logprobs] = {}
    if raw is not None:
        num_tops = [places[at].sequence.params.logprobs or 0 for at in telling]
        told = dict(zip(telling, score_each(raw, [chosen[at] for at in telling], num_tops), strict=True))
    masked = {row.at for row in masks.rows}
    verdict = Verdict()
    for start, (seq, drafts) in zip(starts, drafted, strict=False):
        usable = _usable(seq, range(start, start + len(drafts) + 1), masked, errors)
        kept = _accepted(chosen[start : start + len(drafts) + 1], drafts, usable)
        if kept:
            verdict.tokens[seq] = [Sampled(chosen[at], told.get(at)) for at in range(start, start + kept)]
        else:
            verdict.errors[seq] = errors[start]
    return verdict


def _accepted(chosen: Items[int], drafts: Items[int], usable: int) -> int:
    """How many of the tokens ``chosen`` count: the first, and one behind each accepted draft. ``usable``:
    leading rows that are valid."""
    accepted = 0
    while accepted < len(drafts) and chosen[accepted] == drafts[accepted]:
        accepted += 1
    return min(accepted + 1, usable)


def _usable(seq: Sequence, rows: range, masked: Set[int], errors: Mapping[int, str]) -> int:
    """How many of a sequence's rows come before the first that failed, or that has no mask though it needs
    one. A row in which a plain step would fail too becomes the first of the next step, and ends the request
    there."""
    for count, at in enumerate(rows):
        if at in errors or (seq.guide is not None and at not in masked):
            return count
    return len(rows)
