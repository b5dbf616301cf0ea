"""What replies must be, and who handed what to whom: by the tokens, and by the workers' own records."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from baton.core.sampling_params import ResolvedSampling
from baton.request.sampling import for_choice
from tests.support.rollout.questions import Reply
from tests.support.simulated import Told

_HANDOFF = re.compile(r"^\S+ \S+ DEBUG baton\.roles\.(prefill|decode): handoff (\{.*\})$", re.MULTILINE)
_REFUSED = re.compile(r"revision differs: .*")


class ForeignTokenError(Exception):
    """A token that no revision would have said there."""


def writers(
    prompt: Sequence[int], tokens: Sequence[int], seed: int, revisions: Sequence[str], vocab_size: int
) -> list[str]:
    """Which revision wrote each token of an answer; where several could have, so that there are the fewest
    changes, as two may say the same word by chance.

    KV of one revision in the hands of another gives tokens of none. Raises ForeignTokenError.
    """
    states = {revision: Told(prompt, vocab_size, seed=seed, revision=revision) for revision in revisions}
    found: list[str] = []
    begun = 0
    could = set(revisions)
    """Who could have written everything since ``begun``."""
    for position, token in enumerate(tokens):
        now = {revision for revision, state in states.items() if state.next == token}
        if not now:
            before = ", ".join(sorted(set(found) | (could if position else set()))) or "nothing"
            raise ForeignTokenError(f"token {position}, {token}, is of no revision; before it: {before}")
        if not could & now:
            found += [min(could)] * (position - begun)
            begun, could = position, now
        could &= now
        for state in states.values():
            state.take(token)
    return found + [min(could)] * (len(tokens) - begun)


def wrong_with(reply: Reply) -> str | None:
    """What its end says, whatever its tokens are."""
    if reply.failure is not None:
        return reply.failure
    if reply.left:
        return None
    lengths = {index: len(reply.tokens.get(index, ())) for index in range(reply.question.choices)}
    if any(length != reply.question.length for length in lengths.values()):
        return f"{lengths} of {reply.question.length} tokens"
    if len(reply.finished) != reply.question.choices:
        return "it ended without a finish reason"
    return None


def revisions_of(reply: Reply, revisions: Sequence[str], vocab_size: int) -> list[list[str]]:
    """Of each choice, by token. Raises ForeignTokenError."""
    seed = reply.question.seed
    params = ResolvedSampling(max_tokens=1, seed=seed)
    return [
        writers(reply.prompt, tokens, for_choice(params, index).seed if seed else 0, revisions, vocab_size)
        for index, tokens in sorted(reply.tokens.items())
    ]


@dataclass(slots=True)
class Handoffs:
    """Both ends of each, as workers recorded them."""

    pairs: dict[tuple[str, str], int] = field(default_factory=dict)
    """(revision of prefill, revision of decode) → how many."""
    one_ended: int = 0
    """Those that only one end recorded: the answer was over, or went elsewhere, before the other did."""
    refused: int = 0
    """Links that a worker refused for its revision."""

    @property
    def cross(self) -> int:
        return sum(count for (prefill, decode), count in self.pairs.items() if prefill != decode)

    @property
    def total(self) -> int:
        return sum(self.pairs.values())


def handoffs(logs: Iterable[tuple[str, str]]) -> Handoffs:
    """``logs``: of each worker, its revision and what it logged at the level debug."""
    ends: Mapping[str, dict[tuple[str, int], str]] = {"prefill": {}, "decode": {}}
    found = Handoffs()
    for revision, log in logs:
        for role, line in _HANDOFF.findall(log):
            told = json.loads(line)
            ends[role][told["request_id"], told["attempt"]] = revision
        found.refused += len(_REFUSED.findall(log))
    both = ends["prefill"].keys() & ends["decode"].keys()
    for name in both:
        pair = ends["prefill"][name], ends["decode"][name]
        found.pairs[pair] = found.pairs.get(pair, 0) + 1
    found.one_ended = len(ends["prefill"].keys() ^ ends["decode"].keys())
    return found
