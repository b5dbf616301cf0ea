"""The beams of one request: sequences that go on together, and share the blocks of common beginnings."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

from baton.core.logprobs import Logprobs, TokenDetails
from baton.engine.kv.block_pool import BlockPool
from baton.engine.sampling.beams import BeamSearch, Candidates, Hypothesis
from baton.engine.sequence import FinishReason, Sequence


@dataclass(frozen=True, slots=True)
class AnswerToken:
    """A token of an answer that the search found, in order of answers and tokens."""

    answer: Sequence
    """A finished sequence with the name of the request or of one of its forks."""
    token: int
    index: int
    """The token's index among the tokens of its answer."""
    finish_reason: FinishReason | None
    details: TokenDetails | None


class BeamGroup:
    """The beams of one search, each a sequence to the scheduler. The first beam is the request's own
    sequence.

    The search advances when every beam has computed its last token. While a beam is preempted, the other
    beams wait: they keep their blocks and have nothing to compute. Not locked: the engine's lock guards it.
    """

    def __init__(self, leader: Sequence, stop_ids: frozenset[int]) -> None:
        """``leader`` has its place in the order, and no output yet."""
        params = leader.params
        assert params.beam_search is not None
        self.leader = leader
        self.search = BeamSearch(
            params.beam_search, leader.max_len - leader.num_prompt, stop_ids, params.logprobs
        )
        self.members = [leader]
        """The beams' sequences, in the order of the search's beams."""
        self._candidates: dict[Sequence, Candidates] = {}
        self._prompt_logprobs = (
            Logprobs.join(leader.prompt_logprobs) if params.prompt_logprobs is not None else None
        )

    def take(self, member: Sequence, candidates: Candidates) -> bool:
        """Records the candidates that may follow a beam. True if every beam has its candidates."""
        self._candidates[member] = candidates
        return all(each in self._candidates and each.num_uncomputed == 0 for each in self.members)

    def begin(self, candidates: Candidates) -> list[Sequence]:
        """Takes the first step, from what may follow the prompt. Returns the beams, each with its first
        token; the first is the leader, the others have no blocks. Empty if the search is over."""
        self.search.advance([candidates])
        if self.search.done:
            return []
        self.members += [self.leader.sibling(number) for number in range(1, len(self.search.beams))]
        for member, beam in zip(self.members, self.search.beams, strict=True):
            member.mates = tuple(self.members)
            member.append(beam.token)
        return self.members

    def advance(self, pool: BlockPool) -> bool:
        """Takes a step: each next beam takes over tokens and blocks of its parent. False if the search is
        over."""
        parents = self.search.advance([self._candidates[member] for member in self.members])
        self._candidates.clear()
        if self.search.done:
            return False
        self._inherit([self.members[parent] for parent in parents], pool)
        for member, beam in zip(self.members, self.search.beams, strict=True):
            member.append(beam.token)
        return True

    def answers(self) -> list[AnswerToken]:
        """The best answers, as many as the request has names, once the search is done."""
        named = [self.leader.answer(), *map(self.leader.fork, range(len(self.leader.forks)))]
        return [
            token
            for answer, found in zip(named, self.search.hypotheses[: len(named)], strict=True)
            for token in self._tokens(answer, found)
        ]

    def _tokens(self, answer: Sequence, found: Hypothesis) -> list[AnswerToken]:
        path = found.beam.path()
        last = FinishReason.STOP if found.stopped else FinishReason.LENGTH
        tokens = []
        for index, beam in enumerate(path):
            prompt_logprobs = self._prompt_logprobs if index == 0 else None
            told = beam.logprobs is not None or prompt_logprobs is not None
            details = TokenDetails(beam.logprobs, prompt_logprobs) if told else None
            reason = last if index == len(path) - 1 else None
            tokens.append(AnswerToken(answer, beam.token, index, reason, details))
        return tokens

    def _inherit(self, parents: Items[Sequence], pool: BlockPool) -> None:
        """Makes the i-th beam continue ``parents[i]``. A parent's sequence becomes its first child and keeps
        its blocks; sequences without a child become the remaining children."""
        unused = [member for member in self.members if member not in parents]
        kept: set[Sequence] = set()
        members = []
        for parent in parents:
            child = parent if parent not in kept else unused.pop()
            kept.add(parent)
            if child is not parent:
                child.become(parent, pool)
            members.append(child)
        self.members = members
