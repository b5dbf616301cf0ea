"""One request as the engine sees it: its tokens, and how far their KV has got."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from baton.block_hash import hash_blocks
from baton.engine.beams import Candidates
from baton.engine.block_pool import BlockPool
from baton.engine.phases import Clock
from baton.logprobs import Logprobs, TokenDetails
from baton.sampling_params import SamplingParams
from baton.urgency import CALM, Urgency

if TYPE_CHECKING:
    from baton.engine.guidance import Guide
    from baton.engine.logits import LogitRules


class Status(enum.Enum):
    WAITING = "waiting"
    """Not in a step yet, preempted, or without a seat for its blocks."""
    RUNNING = "running"
    HELD = "held"
    """Prefilled; keeps its blocks for a handoff and is never scheduled or preempted."""
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    STOP = "stop"
    """End of sequence or a stop token."""
    LENGTH = "length"
    """``max_tokens``, the model's context or the whole pool is used up."""
    CANCELLED = "cancelled"
    ERROR = "error"
    """It cannot go on; its own parameters are at fault."""


@dataclass(frozen=True, slots=True)
class Fork:
    """Another answer to the prompt of a sequence, a request of its own from its first token on."""

    request_id: str
    params: SamplingParams
    """As the sequence's but for the seed."""
    first_token: int | None = None
    """Delivered before this attempt: it is not sampled again."""


@dataclass(eq=False, slots=True)
class Sequence:
    """A request and everything derived from it. Compared and hashed by identity.

    ``output_ids`` given at construction are those delivered before this attempt (resume from tokens): they
    are computed like a prompt, but count for ``max_tokens`` and for the index of the next output.

    Once the engine has accepted it, only the engine changes a sequence, under its lock.
    """

    request_id: str
    attempt: int
    prompt_ids: Ids[int]
    params: SamplingParams
    output_ids: list[int] = field(default_factory=list)
    """Grown by :meth:`append` only."""
    hold_after_prefill: bool = False
    """Stop at the first sampled token and keep the blocks, for a handoff to decode."""
    owner: str = ""
    """Whose tokens these are: the router whose stream they go out on."""
    cache_salt: bytes = b""
    """Sequences share cached blocks only within one salt (one tenant)."""
    urgency: Urgency = CALM
    forks: tuple[Fork, ...] = ()
    """Answers that branch off with the first output: the prompt is computed once for all of them."""
    first_token: int | None = None
    """With ``forks``: as ``Fork.first_token``."""

    status: Status = field(default=Status.WAITING, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    arrival: int = field(default=-1, init=False)
    """Rank in the order in which the engine accepted sequences; unique. -1 before."""
    place: tuple[float, int] = field(default=(0.0, -1), init=False)
    """In the order of the queues, the least first: its turn (``Scheduler.turn_of``), then ``arrival``. Given
    once, when the engine accepts it."""
    max_len: int = field(default=0, init=False)
    """Tokens at which it ends for length, whatever of max_tokens, context and pool is least."""
    token_ids: array[int] = field(init=False)
    """Prompt, then outputs, as int64."""
    resumed_from: int = field(init=False)
    """Number of outputs given at construction."""
    block_ids: array[int] = field(default_factory=lambda: array("q"), init=False)
    """Blocks bound to it, in token order, each with one reference of the pool. int64."""
    num_computed: int = field(default=0, init=False)
    """Leading tokens whose KV is in the blocks. Falls back when the sequence is preempted."""
    num_cached: int = field(default=0, init=False)
    """Tokens that came from the prefix cache when it first started."""
    num_expected: int = field(default=0, init=False)
    """While it waits: tokens that will have to be computed, as far as was known when that began."""
    num_indexed: int = field(default=0, init=False)
    """Leading blocks that were offered to the prefix index."""
    hashes: list[bytes] = field(default_factory=list, init=False)
    """Chained digests of the leading full blocks, as far as they have been needed."""
    rules: LogitRules | None = field(default=None, init=False)
    """What its parameters do to its logits; made when the engine accepts it. None: nothing."""
    guide: Guide | None = field(default=None, init=False)
    """Follows it through the grammar of its structured output; given when that is compiled. None: free."""
    details: TokenDetails | None = field(default=None, init=False)
    """Of the last output, if the parameters ask for any."""
    prompt_logprobs: list[Logprobs] = field(default_factory=list, init=False)
    """Of the prompt, a part for each step that computed some; empty again when they are told."""
    num_scored: int = field(default=0, init=False)
    """Leading prompt tokens after which the next one's log-probability is known."""
    forked: tuple[Sequence, ...] = field(default=(), init=False)
    """While it is held: its forks, with their first tokens."""
    num_candidates: int = field(default=0, init=False)
    """Likeliest next tokens that its beam search is to see at each step; set when the engine accepts it.
    0: its next token is chosen."""
    candidates: Candidates | None = field(default=None, init=False)
    """While it is held: for its beam search, those after the prompt."""
    mates: tuple[Sequence, ...] = field(default=(), init=False, repr=False)
    """The beams of its search, itself among them: they go on together. Empty: it goes alone."""
    accepted_at: float = field(default=0.0, init=False)
    """When the engine took it, on the monotonic clock."""
    began_at: float = field(default=0.0, init=False)
    """When the step began that computed something of it for the first time. 0.0: none has, or it branched off
    another one."""
    started: bool = field(default=False, init=False)
    """A step has computed, or is about to compute, something of it here."""
    clock: Clock | None = field(default=None, init=False)
    """Of a request that was submitted here, until its prompt is computed."""
    preemptions: int = field(default=0, init=False)
    cancelled: bool = field(default=False, init=False)
    """Cancelled while a forward pass was using its blocks: ends when that pass is over."""

    def __post_init__(self) -> None:
        self.output_ids = list(self.output_ids)
        self.resumed_from = len(self.output_ids)
        self.token_ids = array("q", self.prompt_ids)
        self.token_ids.extend(self.output_ids)

    @property
    def num_prompt(self) -> int:
        return len(self.prompt_ids)

    @property
    def num_outputs(self) -> int:
        return len(self.output_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def num_reusable(self) -> int:
        """Leading tokens whose KV may come from the prefix cache. The last token is always computed: the next
        one needs its logits. So is, when the prompt's log-probabilities are asked for, every prompt token
        that they are not known after: what is cached has no logits."""
        return self.num_scored if self.scores_prompt else self.num_tokens - 1

    @property
    def scores_prompt(self) -> bool:
        """Whether the prompt's log-probabilities are still to be told. They go with the first output, so a
        sequence that has any was told of by whoever sampled it."""
        return self.params.prompt_logprobs is not None and not self.output_ids

    def add_prompt_logprobs(self, part: Logprobs) -> None:
        """Takes the log-probabilities of the prompt tokens that follow those scored before."""
        self.prompt_logprobs.append(part)
        self.num_scored += len(part)

    def append(self, token: int, logprobs: Logprobs | None = None) -> None:
        """Adds a sampled token, with its log-probabilities if they are asked for."""
        if self.scores_prompt:
            self.details = TokenDetails(logprobs, Logprobs.join(self.prompt_logprobs))
            self.prompt_logprobs.clear()
        else:
            self.details = None if logprobs is None else TokenDetails(logprobs)
        self.output_ids.append(token)
        self.token_ids.append(token)

    def fork(self, number: int) -> Sequence:
        """The ``number``-th of ``forks``, before any of them has an output. Without blocks."""
        fork = self.forks[number]
        child = self._like(fork.request_id, fork.params)
        child.arrival = self.arrival + 1 + number
        child.place = (self.place[0], child.arrival)
        child.prompt_logprobs = list(self.prompt_logprobs)
        child.num_scored = self.num_scored
        return child

    def _like(self, request_id: str, params: SamplingParams) -> Sequence:
        """Another answer to the same prompt, without outputs, blocks or a place."""
        child = Sequence(
            request_id,
            self.attempt,
            self.prompt_ids,
            params,
            owner=self.owner,
            cache_salt=self.cache_salt,
            urgency=self.urgency,
        )
        child.max_len = self.max_len
        child.num_cached = self.num_cached
        child.hashes = self.hashes[:]
        return child

    def sibling(self, number: int) -> Sequence:
        """The ``number``-th beam of this one's search, from 1, before any of them has an output. Without
        blocks; its place is right behind this one's."""
        beam = self._like(self.request_id, self.params)
        beam.arrival = self.arrival + number
        beam.place = (self.place[0], beam.arrival)
        beam.num_candidates = self.num_candidates
        return beam

    def answer(self) -> Sequence:
        """A sequence of the same name that only says whose an answer is."""
        return self._like(self.request_id, self.params)

    def become(self, other: Sequence, pool: BlockPool) -> None:
        """Takes over tokens and blocks of another beam; what they have in common stays."""
        alike = _common(self.block_ids, other.block_ids)
        pool.ref(other.block_ids[alike:])
        pool.free(self.block_ids[alike:])
        self.block_ids[alike:] = other.block_ids[alike:]
        self.token_ids = other.token_ids[:]
        self.output_ids = other.output_ids[:]
        self.hashes = other.hashes[:]
        self.num_computed, self.num_indexed = other.num_computed, other.num_indexed

    def num_common(self, other: Sequence) -> int:
        """Leading tokens that both have."""
        return _common(self.token_ids, other.token_ids)

    def bind(self, blocks: Iterable[int]) -> None:
        """Takes over one reference on each of ``blocks``, as the next blocks of the sequence."""
        self.block_ids.extend(blocks)

    def extend_hashes(self, block_size: int) -> None:
        """Brings ``hashes`` up to the last full block of the tokens there are."""
        parent = self.hashes[-1] if self.hashes else None
        start = len(self.hashes) * block_size
        self.hashes.extend(hash_blocks(self.token_ids, block_size, self.cache_salt, start, parent))


def _common(one: array[int], other: array[int]) -> int:
    """The length of the longest prefix of both. int64."""
    length = min(len(one), len(other))
    if not length:
        return 0
    different = np.frombuffer(one, np.int64, length) != np.frombuffer(other, np.int64, length)
    first = int(different.argmax())
    return first if different[first] else length
