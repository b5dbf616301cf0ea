"""The beams of one request: sequences that go on together, and share blocks where they began alike."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

from baton.engine.beams import BeamSearch, Candidates, Hypothesis
from baton.engine.block_pool import BlockPool
from baton.engine.sequence import FinishReason, Sequence
from baton.logprobs import Logprobs, TokenDetails


@dataclass(frozen=True, slots=True)
class AnswerToken:
    """A token of an answer that was found, in order of answers and tokens."""

    answer: Sequence
    """Named as the request, or as one of its forks. Over by now."""
    token: int
    index: int
    """Among the tokens of its answer."""
    finish_reason: FinishReason | None
    details: TokenDetails | None


class BeamGroup:
    """The beams of one search, each a sequence to the scheduler. The first of them is the request's own.

    A step of the search is taken when every beam has computed its last token. A beam that the scheduler has
    preempted is waited for: the others keep their blocks and have nothing to compute. Not locked: the
    engine's lock guards it.
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
        """In the order of the search's beams."""
        self._candidates: dict[Sequence, Candidates] = {}
        self._prompt_logprobs = (
            Logprobs.join(leader.prompt_logprobs) if params.prompt_logprobs is not None else None
        )

    def take(self, member: Sequence, candidates: Candidates) -> bool:
        """What may follow a beam is known. True if that is so for all of them."""
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
        """Takes a step: the next beams take over tokens and blocks of those that they go on from. False if
        the search is over."""
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
        """The i-th beam goes on from ``parents[i]``. Whoever has a child becomes its first one and keeps what
        it has; those without any become the others."""
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
