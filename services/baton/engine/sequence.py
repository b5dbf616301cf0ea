"""One request as the engine sees it: its tokens, and how many of them have their KV computed."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from baton.core.block_hash import hash_blocks
from baton.core.logprobs import Logprobs, TokenDetails
from baton.core.priority import NO_PRIORITY, Priority
from baton.core.sampling_params import ResolvedSampling
from baton.engine.kv.arriving import Arriving
from baton.engine.kv.block_pool import BlockPool
from baton.engine.phases import Clock
from baton.engine.sampling.beams import Candidates

if TYPE_CHECKING:
    from baton.engine.sampling.guidance import Guide
    from baton.engine.sampling.logits import LogitRules


GONE = -1
"""The entry of a table whose page was given back."""


class SequenceStatus(enum.Enum):
    WAITING = "waiting"
    """The state of a sequence that is not in a step yet, is preempted, or has blocks and no seat."""
    RUNNING = "running"
    HELD = "held"
    """The state of a prefilled sequence that keeps its blocks for a handoff; never scheduled or preempted."""
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    STOP = "stop"
    """The model's end of sequence, or a stop token."""
    LENGTH = "length"
    """``max_tokens``, the model's context or the whole pool is used up."""
    CANCELLED = "cancelled"
    ERROR = "error"
    """The sequence cannot go on; its own parameters are at fault."""


@dataclass(frozen=True, slots=True)
class Fork:
    """Another answer to the prompt of a sequence, a request of its own from its first token on."""

    request_id: str
    params: ResolvedSampling
    """The sequence's parameters with a seed of the fork's own."""
    first_token: int | None = None
    """A first token that was delivered before this attempt, and is not sampled again."""


@dataclass(eq=False, slots=True)
class Sequence:
    """A request and everything derived from it. Compared and hashed by identity.

    ``output_ids`` given at construction were delivered before this attempt (resume from tokens): they are
    computed like a prompt, but count for ``max_tokens`` and for the index of the next output.

    Once the engine has accepted it, only the engine changes a sequence, under its lock.
    """

    request_id: str
    attempt: int
    prompt_ids: Ids[int]
    params: ResolvedSampling
    output_ids: list[int] = field(default_factory=list)
    """The outputs; only :meth:`append` grows them."""
    hold_after_prefill: bool = False
    """Stop at the first sampled token and keep the blocks, for a handoff to decode."""
    owner: str = ""
    """The router whose stream the tokens go out on."""
    cache_salt: bytes = b""
    """Sequences share cached blocks only within one salt (one tenant)."""
    priority: Priority = NO_PRIORITY
    forks: tuple[Fork, ...] = ()
    """Answers that branch off with the first output: the prompt is computed once for all of them."""
    first_token: int | None = None
    """The sequence's own ``Fork.first_token``, if it has ``forks``."""

    status: SequenceStatus = field(default=SequenceStatus.WAITING, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    arrival: int = field(default=-1, init=False)
    """The rank in the order in which the engine accepted sequences; unique. -1 before."""
    place: tuple[float, int] = field(default=(0.0, -1), init=False)
    """The place in the order of the queues, the least first: the turn (``Scheduler.turn_of``), then
    ``arrival``. Set once, when the engine accepts the sequence."""
    max_len: int = field(default=0, init=False)
    """Tokens at which the sequence ends for length: the least of what max_tokens, context and pool allow."""
    token_ids: array[int] = field(init=False)
    """Prompt, then outputs, as int64."""
    resumed_from: int = field(init=False)
    """Number of outputs given at construction."""
    block_ids: array[int] = field(default_factory=lambda: array("q"), init=False)
    """Blocks bound to the sequence, in token order, each with one reference of the pool. int64. If blocks lie
    in several pages, those of table 0; ``GONE`` for pages that no later token sees."""
    more_tables: tuple[array[int], ...] = field(default=(), init=False)
    """The tables from table 1 on, as long as ``block_ids``."""
    gone: dict[int, int] = field(default_factory=dict, init=False)
    """Leading blocks of a group, by its index, whose pages were given back: no later token sees them."""
    partial: dict[int, int] = field(default_factory=dict, init=False)
    """The block of a group, by its index, that lacks its first tokens, which no later token sees."""
    state_pages: array[int] = field(default_factory=lambda: array("q"), init=False)
    """Pages of the state behind the scheduled tokens, each with one reference of the pool; none before the
    first step, or if no layer keeps a state."""
    keeps_state: bool = field(default=False, init=False)
    """Whether these pages must not be written to: they are, or will be, found by other sequences."""
    next_state: array[int] = field(default_factory=lambda: array("q"), init=False)
    """Pages that the next step writes the state to, if it may not overwrite the present one."""
    snapshot: int = field(default=0, init=False)
    """Whole blocks in front of the last snapshot of its state that was kept; 0: none was."""
    draft_states: list[array[int]] = field(default_factory=list, init=False)
    """Pages of the states behind each draft that was just verified."""
    num_block_changes: int = field(default=0, init=False)
    """How often a block of the table was replaced or taken, as opposed to added."""
    num_computed: int = field(default=0, init=False)
    """Leading tokens whose KV is in the blocks. Falls back when the sequence is preempted."""
    steps_under_way: int = field(default=0, init=False)
    """Steps under way that compute something of the sequence. Until they are over its blocks are not free,
    whatever becomes of the sequence: kernels may still write there."""
    num_under_way: int = field(default=0, init=False)
    """Tokens behind the computed ones that these steps compute."""
    num_pending: int = field(default=0, init=False)
    """Tokens that these steps choose, and that are not in ``token_ids`` yet."""
    num_cached: int = field(default=0, init=False)
    """Tokens that came from the prefix cache when the sequence first started."""
    num_expected: int = field(default=0, init=False)
    """Tokens that a waiting sequence will have to compute, as estimated when it began to wait."""
    num_indexed: int = field(default=0, init=False)
    """Leading blocks that were offered to the prefix index."""
    hashes: list[bytes] = field(default_factory=list, init=False)
    """Chained digests of the leading full blocks, as far as they have been needed."""
    rules: LogitRules | None = field(default=None, init=False)
    """The changes that the parameters make to the logits; set when the engine accepts the sequence. None:
    none."""
    guide: Guide | None = field(default=None, init=False)
    """The guide through the grammar of the structured output; set when that is compiled. None:
    unconstrained."""
    details: TokenDetails | None = field(default=None, init=False)
    """Details of the last output, if the parameters ask for any."""
    prompt_logprobs: list[Logprobs] = field(default_factory=list, init=False)
    """Log-probabilities of the prompt, a part for each step that computed some; emptied when they go out."""
    num_scored: int = field(default=0, init=False)
    """Leading prompt tokens after which the next token's log-probability is known."""
    forked: tuple[Sequence, ...] = field(default=(), init=False)
    """The forks of a held sequence, with their first tokens."""
    num_candidates: int = field(default=0, init=False)
    """Likeliest next tokens that the beam search is to see at each step; set when the engine accepts the
    sequence. 0: no beam search, the sampler chooses."""
    candidates: Candidates | None = field(default=None, init=False)
    """The candidates after the prompt, for the beam search of a held sequence."""
    mates: tuple[Sequence, ...] = field(default=(), init=False, repr=False)
    """The beams of the sequence's search, itself among them, which advance together. Empty: no beam
    search."""
    accepted_at: float = field(default=0.0, init=False)
    """The time the engine accepted the sequence, on the monotonic clock, in seconds."""
    began_at: float = field(default=0.0, init=False)
    """The start of the first step that computed something of the sequence, on the monotonic clock, in
    seconds. 0.0: no step has, or the sequence branched off another."""
    started: bool = field(default=False, init=False)
    """Whether a step has computed, or is about to compute, something of the sequence here."""
    clock: Clock | None = field(default=None, init=False)
    """The clock of a request that was submitted here, until its prompt is computed."""
    preemptions: int = field(default=0, init=False)

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
    def num_scheduled(self) -> int:
        """Leading tokens whose KV is in the blocks, or will be when the steps under way are over."""
        return self.num_computed + self.num_under_way

    @property
    def num_uncomputed(self) -> int:
        """Tokens, the pending ones included, that no step has computed or is computing."""
        return len(self.token_ids) + self.num_pending - self.num_computed - self.num_under_way

    @property
    def num_missing(self) -> int:
        """Tokens whose KV is not in the blocks yet, whether or not a step under way computes it."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_reusable(self) -> int:
        """Leading tokens whose KV may come from the prefix cache. The last token is always computed: its
        logits choose the next one. With log-probabilities of the prompt, every prompt token after which none
        is known yet is computed too: cached blocks have no logits."""
        return self.num_scored if self.scores_prompt else self.num_tokens - 1

    @property
    def scores_prompt(self) -> bool:
        """Whether the prompt's log-probabilities are still to be delivered. They go with the first output, so
        a sequence with outputs has had them delivered by the worker that sampled the first."""
        return self.params.prompt_logprobs is not None and not self.output_ids

    def add_prompt_logprobs(self, part: Logprobs) -> None:
        """Adds the log-probabilities of the prompt tokens that follow the tokens scored before."""
        self.prompt_logprobs.append(part)
        self.num_scored += len(part)

    def append(self, token: int, logprobs: Logprobs | None = None) -> None:
        """Adds a sampled token, with its log-probabilities if the request asked for them."""
        if self.scores_prompt:
            self.details = TokenDetails(logprobs, Logprobs.join(self.prompt_logprobs))
            self.prompt_logprobs.clear()
        else:
            self.details = None if logprobs is None else TokenDetails(logprobs)
        self.output_ids.append(token)
        self.token_ids.append(token)

    def fork(self, number: int) -> Sequence:
        """The ``number``-th of ``forks``, before any fork has an output. Without blocks."""
        fork = self.forks[number]
        child = self._like(fork.request_id, fork.params)
        child.arrival = self.arrival + 1 + number
        child.place = (self.place[0], child.arrival)
        child.prompt_logprobs = list(self.prompt_logprobs)
        child.num_scored = self.num_scored
        return child

    def _like(self, request_id: str, params: ResolvedSampling) -> Sequence:
        """Another answer to the same prompt, without outputs, blocks or a place."""
        child = Sequence(
            request_id,
            self.attempt,
            self.prompt_ids,
            params,
            owner=self.owner,
            cache_salt=self.cache_salt,
            priority=self.priority,
        )
        child.max_len = self.max_len
        child.num_cached = self.num_cached
        child.hashes = self.hashes[:]
        return child

    def sibling(self, number: int) -> Sequence:
        """The ``number``-th beam of this sequence's search, from 1, before any beam has an output. Without
        blocks; its place is right behind this sequence's."""
        beam = self._like(self.request_id, self.params)
        beam.arrival = self.arrival + number
        beam.place = (self.place[0], beam.arrival)
        beam.num_candidates = self.num_candidates
        return beam

    def answer(self) -> Sequence:
        """A sequence of the same name, without outputs, that names an answer."""
        return self._like(self.request_id, self.params)

    def answers_like(self, other: Sequence) -> bool:
        """Whether both are answers to the very same prompt, with the same parameters but for the seed."""
        params, others = self.params, other.params
        return self.prompt_ids is other.prompt_ids and replace(params, seed=others.seed) == others

    def num_gone(self, group: int) -> int:
        """Leading blocks of a group, by its index, whose pages were given back."""
        return self.gone.get(group, 0)

    @property
    def tables(self) -> tuple[array[int], ...]:
        """All tables of pages, each with a page of every block."""
        return (self.block_ids, *self.more_tables)

    def lay_out(self, num_tables: int) -> None:
        """Takes blocks of ``num_tables`` pages from now on."""
        if len(self.more_tables) != num_tables - 1:
            self.more_tables = tuple(array("q") for _ in range(num_tables - 1))

    def share(self, other: Sequence, pool: BlockPool) -> None:
        """Takes a reference on all pages of another sequence; this one has none, and goes on from there."""
        self.lay_out(len(other.tables))
        for own, table in zip(self.tables, other.tables, strict=True):
            own.extend(table)
        self.gone = dict(other.gone)
        self.state_pages = other.state_pages[:]
        self.keeps_state = other.keeps_state
        self.num_computed, self.num_indexed = other.num_computed, other.num_indexed
        pool.ref(self.shared_pages())

    def become(self, other: Sequence, pool: BlockPool) -> None:
        """Takes over tokens and blocks of another beam; common blocks stay."""
        if self.more_tables or self.gone or self.state_pages:
            pool.ref(other.shared_pages())
            pool.free(self.held_pages())
            for own, table in zip(self.tables, other.tables, strict=True):
                own[:] = table
            self.gone = dict(other.gone)
            self.state_pages, self.keeps_state = other.state_pages[:], other.keeps_state
            self.next_state = array("q")
        else:
            alike = _common(self.block_ids, other.block_ids)
            pool.ref(other.block_ids[alike:])
            pool.free(self.block_ids[alike:])
            self.block_ids[alike:] = other.block_ids[alike:]
        self.num_block_changes += 1
        self.token_ids = other.token_ids[:]
        self.output_ids = other.output_ids[:]
        self.hashes = other.hashes[:]
        self.num_computed, self.num_indexed = other.num_computed, other.num_indexed

    def num_common(self, other: Sequence) -> int:
        """The number of leading tokens that both sequences have."""
        return _common(self.token_ids, other.token_ids)

    def bind(self, blocks: Iterable[int]) -> None:
        """Takes over one reference on each of ``blocks``, as the next blocks of the sequence."""
        self.block_ids.extend(blocks)

    def arrive(self, arriving: Arriving) -> None:
        """Takes over the pages in which the KV of all tokens has arrived."""
        self.lay_out(sum(len(group.group.tables) for group in arriving.groups if not group.is_state))
        for number, group in enumerate(arriving.groups):
            if group.is_state:
                self.state_pages = array("q", group.pages)
                continue
            width = len(group.group.tables)
            for at, table in enumerate(group.group.tables):
                self.tables[table].extend([GONE] * group.first)
                self.tables[table].extend(group.pages[at::width])
            if group.first:
                self.gone[number] = group.first
            if group.partial:
                self.partial[number] = group.first

    def unbind(self, kept: int = 0) -> array[int]:
        """Returns the pages of all blocks but the first ``kept``, which are the sequence's no more."""
        if not self.more_tables and not self.gone:
            pages = self.block_ids[kept:]
            del self.block_ids[kept:]
        else:
            pages = self._pages_from(kept)
            for table in self.tables:
                del table[kept:]
            self.gone = {group: min(gone, kept) for group, gone in self.gone.items() if kept}
        if pages:
            self.num_block_changes += 1
        return pages

    def unbind_all(self) -> array[int]:
        """Returns all pages of the sequence, its states' too, which are its no more."""
        pages = self.unbind()
        for states in (self.state_pages, self.next_state, *self.draft_states):
            pages.extend(states)
        self.state_pages, self.next_state = array("q"), array("q")
        self.draft_states.clear()
        self.partial.clear()
        self.keeps_state = False
        return pages

    def held_pages(self) -> array[int]:
        """All pages of the sequence, its states' too, the last block's last."""
        pages = self._pages_from(0)
        for states in (self.state_pages, self.next_state, *self.draft_states):
            pages.extend(states)
        return pages

    def shared_pages(self) -> array[int]:
        """All pages of what is computed: of the blocks, and of the state behind them."""
        pages = self._pages_from(0)
        pages.extend(self.state_pages)
        return pages

    def _pages_from(self, first: int) -> array[int]:
        if not self.more_tables and not self.gone:
            return self.block_ids[first:]
        blocks = zip(*(table[first:] for table in self.tables), strict=True)
        return array("q", (page for block in blocks for page in block if page != GONE))

    def rebind(self, at: int, block: int, table: int = 0) -> None:
        """Puts another page into a table's place ``at``."""
        self.tables[table][at] = block
        self.num_block_changes += 1

    def extend_hashes(self, block_size: int, kv_dtype: str = "") -> None:
        """Extends ``hashes`` to the last full block of the tokens. ``kv_dtype``: see
        ``baton.core.block_hash.chain``."""
        parent = self.hashes[-1] if self.hashes else None
        start = len(self.hashes) * block_size
        self.hashes.extend(hash_blocks(self.token_ids, block_size, self.cache_salt, start, parent, kv_dtype))


def _common(one: array[int], other: array[int]) -> int:
    """The length of the longest common prefix. int64."""
    length = min(len(one), len(other))
    if not length:
        return 0
    different = np.frombuffer(one, np.int64, length) != np.frombuffer(other, np.int64, length)
    first = int(different.argmax())
    return first if different[first] else length
