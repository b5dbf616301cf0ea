"""The scheduler: which sequences compute how many tokens in the next step, and which blocks these tokens get.

Every sequence has a place in one order, given once, on acceptance. Under FCFS it is the order of arrival.
Under priorities it is the order of ``since + priority * aging``: a level of priority is worth that many
seconds of waiting, so that a sequence cannot be overtaken by sequences that come later than that, and none
starves.

Continuous batching under a token budget. A step is filled in this order: sequences with one token to compute
(they decode), then prompts already begun, then waiting sequences, each group in order. So decoding never
waits for a prompt, and no waiting sequence is overtaken by one behind it.

Blocks are bound for the tokens of the step only. When none is left, the last sequence in order that holds any
is preempted: its blocks go back to the pool, its tokens stay, and it waits to be recomputed. A sequence that
is itself the last just pauses. So a sequence loses computed tokens only to one before it that gains, and as
no arrival can come before that for ever, some sequence always gets to the end.

Forks of a sequence share its blocks, and come right behind it in the order. A sequence that is to write into
a shared block gets a copy of it first, and the last one that refers to a block writes in place.

The beams of a search advance together: a beam that has computed its last token waits, with its blocks, for
the other beams of its search, its mates. Where that stops every sequence, sequences behind the first in the
queue make room for it. A beam that comes back shares the blocks of its mates again, so that a search that
fits in the pool alone gets to its end.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, NamedTuple

from baton.engine.kv.arriving import Arriving, ArrivingGroup, needed_blocks, runs_of
from baton.engine.kv.block_pool import BlockPool
from baton.engine.kv.host_tier import HostTier
from baton.engine.kv.page_counts import PageCounts
from baton.engine.kv.prefix_cache import NOTHING, GroupHit, Hit, PrefixCache, key_of
from baton.engine.sequence import GONE, FinishReason, Sequence, SequenceStatus
from baton.engine.sequence_states import SequenceStates, StateMove
from baton.process.exported import Counters, counter
from baton_kernels.kv_layout import KVGroup, KVLayout


class BeamsDoNotFitError(ValueError):
    """A beam search whose beams could never be in the pool, or run, together."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits of steps and sequences: ``max_num_batched_tokens`` bounds a step (except a whole prompt with
    ``chunked_prefill`` off), ``prefill_chunk`` one sequence's share of it, ``max_num_seqs`` the sequences
    that run at once, ``max_model_len`` prompt and outputs together."""

    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_chunk: int
    max_model_len: int
    chunked_prefill: bool = True
    prefix_caching: bool = True
    longest_shared_prompt: int | None = None
    """The longest prompt, in tokens, whose request uses and feeds the prefix cache: the model gives the KV of
    longer prompts a meaning of its own. None: any."""
    priority_aging: float | None = None
    """The waiting time that is worth one level of priority, in seconds. None: first come, first served, and
    no priority but 0."""
    mixed_prefill_tokens: int | None = None
    """Most prompt tokens of a step in which a sequence decodes, with ``chunked_prefill``: the decoding
    sequences wait for the whole step. None: only ``max_num_batched_tokens`` bounds them."""

    def shares(self, seq: Sequence) -> bool:
        """Whether this sequence uses the prefix cache."""
        longest = self.longest_shared_prompt
        return self.prefix_caching and (longest is None or seq.num_prompt <= longest)


class Scheduled(NamedTuple):
    sequence: Sequence
    num_new: int
    """Tokens to compute from ``start`` on; their blocks are bound."""
    start: int
    """The sequence's tokens before, whose KV is in its blocks when the step begins."""
    chooses: bool
    """Whether the step computes the last token of the sequence, so that the next one is chosen."""


class Copy(NamedTuple):
    """A shared block of ``sequence``, and the block of its own that replaced it in its table. The step copies
    the content before it computes anything. Until the step is over the copy keeps the reference on
    ``source``."""

    sequence: Sequence
    at: int
    """The block's index in the table."""
    source: int
    target: int
    table: int = 0


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step's work: first the entries of a single token, then the longer chunks."""

    items: tuple[Scheduled, ...]
    num_single: int
    """Leading entries whose ``num_new`` is 1."""
    copies: tuple[Copy, ...] = ()
    drafts: Mapping[Sequence, Items[int]] = field(default_factory=dict)
    """Tokens to compute behind the last one of some sequences: they count in ``num_new``, and are never in
    the sequence's tokens."""
    starved: bool = False
    """Whether a sequence got no block or seat, as a step was under way and nothing was taken from others."""
    moves: tuple[StateMove, ...] = ()
    """What the step does with each entry's state, if layers keep any."""


@dataclass
class SchedulerCounters(Counters):
    """What a scheduler has counted since it was made."""

    preemptions: Annotated[
        int, counter("baton_preemptions", "Sequences that lost their blocks to others.")
    ] = 0
    copied_blocks: Annotated[
        int,
        counter("baton_kv_blocks_copied", "Blocks copied for one of several answers, or beams, to write to."),
    ] = 0
    prefix_queried_tokens: Annotated[
        int, counter("baton_prefix_queried_tokens", "Tokens looked up in the prefix cache.")
    ] = 0
    prefix_hit_tokens: Annotated[int, counter("baton_prefix_hit_tokens", "Tokens found in it.")] = 0
    swapped_in: Annotated[
        int, counter("baton_sequences_swapped_in", "Preempted sequences that came back by copy.")
    ] = 0
    """Sequences of which at least a part came back by copy."""


class Scheduler:
    """Queues, seats and the binding of blocks. Not locked: the engine's lock guards it and its pool.

    A step is under way from ``begin`` to ``land``. While it is, ``schedule`` may only be called ``ahead``,
    for one step more; otherwise ``begin`` and ``land`` may be left out, and ``advance`` reports the step.
    With a host tier, which then hears of what the pool evicts, its plan must be carried out after
    ``schedule`` and ``match_prefix``, before the lock is free: the copies of the step write to evicted
    blocks.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        pool: BlockPool,
        tier: HostTier | None = None,
        layout: KVLayout | None = None,
    ) -> None:
        """``layout``: the groups that the pool's pages are for; None: a page is a block of all layers."""
        self.limits = limits
        self.pool = pool
        self.tier = tier
        self.layout = layout or KVLayout.of_one(pool.block_size)
        # Windows move on as long as there is a page for a block: longer chunks take what there is.
        chunk = pool.block_size if limits.chunked_prefill else limits.max_model_len
        self.counts = PageCounts(self.layout, chunk)
        self.cache = PrefixCache(self.layout, pool, tier, self.counts)
        self.states = SequenceStates(pool, self.layout.state_pages, len(self.layout.groups) - 1)
        self._tables = self.layout.num_tables
        self._keeps_blocks = self.layout.keeps_blocks
        self._windows = tuple(
            (number, group) for number, group in enumerate(self.layout.groups) if group.kind == "window"
        )
        self.reserved_blocks = 0
        """Pages promised to handoffs and not bound yet. No waiting sequence is started in them; running
        sequences may grow into them, and the handoff then waits for its pages."""
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.joining: list[Sequence] = []
        """Sequences with blocks and without a seat: they arrived computed, or lost their seat to one that
        did. When a step has shared out the seats, all of them are behind every sequence with a seat. They get
        seats before ``waiting`` does: behind it, blocks they hold could be the very ones its first sequence
        waits for."""
        self.held: set[Sequence] = set()
        self.counters = SchedulerCounters()
        self.longest_sequence = self.counts.most_tokens(pool.num_blocks, limits.max_model_len)
        """The tokens of the longest sequence that the pool holds."""
        self._pages_are = f"blocks of {pool.block_size}" if self._keeps_blocks else "pages"
        self._lost_states: set[Sequence] = set()
        """Sequences whose states a step that failed may have written to."""
        self._arrivals = 0
        self._waiting_tokens = 0
        self._copies: list[Copy] = []
        """Copies of the steps that are not over, in order."""
        self._ahead = False
        """Whether the step that is being planned follows one that is under way."""
        self._starved = False
        """Whether a sequence could not be given a block or a seat without taking another's, which has to
        wait."""

    # -- entering and leaving ----------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.joining or self.waiting)

    @property
    def waiting_prefill_tokens(self) -> int:
        """Tokens accepted but not computed, those of preempted sequences included; for waiting sequences,
        less what the prefix cache had when they began to wait. O(running)."""
        begun = sum(s.num_uncomputed for s in (*self.running, *self.joining) if s.num_uncomputed > 1)
        return begun + self._waiting_tokens

    def add(self, seq: Sequence) -> None:
        """Queues a new sequence. ValueError if it could never produce a token here."""
        self.accept(seq)
        self._enqueue(seq)

    def admit_computed(self, seq: Sequence) -> None:
        """Takes a sequence whose blocks hold the KV of all its tokens but the last (an output). Its full
        blocks enter the prefix index now. ValueError as for :meth:`add`, or if the blocks do not match."""
        bound = self._blocks_for(seq.num_tokens - 1)
        lengths = {len(table) for table in seq.tables}
        if lengths != {bound} or len(seq.tables) != self._tables or not seq.output_ids:
            raise ValueError(
                f"request {seq.request_id}: {len(seq.block_ids)} blocks and {seq.num_outputs} outputs "
                f"with {seq.num_tokens} tokens; expected {bound} blocks and at least 1 output"
            )
        self.accept(seq)
        self.join(seq)

    def join(self, seq: Sequence) -> None:
        """Takes an accepted sequence whose blocks hold the KV of all its tokens but the last."""
        seq.num_computed = seq.num_tokens - 1
        self._index_full_blocks(seq)
        insort(self.joining, seq, key=_place)

    def adopt(self, child: Sequence, parent: Sequence) -> None:
        """Takes a fork that has its first output, with the blocks of ``parent``, which is running. The fork
        has its place already, right behind its parent. Without a free seat it waits as if it had been
        preempted; with one, the next step sees whether a sequence in ``joining`` goes before it."""
        if len(self.running) < self.limits.max_num_seqs:
            child.share(parent, self.pool)
            self._seat(child)
        else:
            self._enqueue(child)

    def hold(self, seq: Sequence) -> None:
        """Takes a running sequence out of scheduling; it keeps its blocks until ``finish``."""
        self._remove(self.running, seq)
        seq.status = SequenceStatus.HELD
        self.held.add(seq)

    def finish(self, seq: Sequence, reason: FinishReason | None) -> None:
        """Ends a sequence in whatever state it is, and frees its blocks: now, or when the steps that compute
        it are over."""
        if seq.status is SequenceStatus.RUNNING:
            self._remove(self.running, seq)
        elif seq.status is SequenceStatus.HELD:
            self.held.remove(seq)
        elif seq in self.joining:
            self.joining.remove(seq)
        else:
            self._dequeue(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason
        self._free_unused(seq)

    def _free_unused(self, seq: Sequence) -> None:
        if not seq.steps_under_way:
            self._give_up_pages(seq)

    def _give_up_pages(self, seq: Sequence) -> None:
        self.pool.free(seq.unbind_all())
        self.states.given_up(seq)

    def advance(self, seq: Sequence, num_new: int) -> None:
        """Records that ``num_new`` more tokens of ``seq`` are computed; the blocks they fill become
        findable."""
        seq.num_computed += num_new
        self._index_full_blocks(seq)
        if self._windows:
            self._free_unseen(seq)

    def _free_unseen(self, seq: Sequence) -> None:
        """Gives back the pages that no token to come sees. Steps under way see what is behind the computed
        tokens only."""
        for number, group in self._windows:
            gone, first = seq.num_gone(number), self.counts.first_seen(group, seq.num_computed)
            if first <= gone:
                continue
            seq.gone[number] = first
            for index in range(gone, min(first, len(seq.block_ids))):
                pages = [seq.tables[table][index] for table in group.tables]
                for table in group.tables:
                    seq.tables[table][index] = GONE
                self.pool.free(pages)

    @property
    def drafting(self) -> list[Sequence]:
        """Sequences that may have drafts in the next step."""
        return [seq for seq in self.running if self.may_draft(seq)]

    @staticmethod
    def may_draft(seq: Sequence) -> bool:
        """Whether the sequence decodes, and not for a beam search; not before its first output, with which
        its forks branch off."""
        decodes = seq.num_uncomputed == 1 and bool(seq.output_ids) and not seq.hold_after_prefill
        return decodes and seq.params.beam_search is None

    def accept_drafts(self, seq: Sequence, num_accepted: int) -> None:
        """Records that ``num_accepted`` drafts, which are outputs now, are computed besides what ``advance``
        recorded; blocks of the rejected drafts go back."""
        self.states.accept(seq, num_accepted)
        self.advance(seq, num_accepted)
        bound = self._blocks_for(seq.num_computed)
        self.pool.free(seq.unbind(bound))

    def begin(self, batch: ScheduledBatch) -> None:
        """Records that a scheduled step is under way."""
        for seq, num_new, _, chooses in batch.items:
            seq.steps_under_way += 1
            seq.num_under_way += num_new
            seq.num_pending += chooses

    def land(self, batch: ScheduledBatch, *, copied: bool = True) -> None:
        """Records that the first of the steps under way is over and reported by ``advance``, before its
        tokens are added; or that the last of them failed. Frees the blocks of its sequences that have ended
        meanwhile. ``copied``: whether the step has copied blocks; if not, the copies are undone."""
        ended: list[Sequence] = []
        for seq, num_new, _, chooses in batch.items:
            seq.steps_under_way -= 1
            seq.num_under_way -= num_new
            seq.num_pending -= chooses
            if seq.status is SequenceStatus.FINISHED:
                ended.append(seq)
        if batch.copies:
            self._end_copies(batch.copies, copied)
        for move in batch.moves:
            (self.states.land if copied else self.states.undo)(move)
        for seq in ended:
            self._free_unused(seq)
        if batch.moves and not copied:
            self._lost_states.update(move.sequence for move in batch.moves)
        if self._lost_states:
            self._begin_anew()

    def _begin_anew(self) -> None:
        """Sends sequences of steps that failed back to wait once no other step computes them: the steps may
        have written to their states."""
        for seq in [seq for seq in self._lost_states if not seq.steps_under_way]:
            self._lost_states.remove(seq)
            if seq.status is SequenceStatus.RUNNING:
                self._remove(self.running, seq)
                self._preempt(seq)

    def _end_copies(self, copies: Items[Copy], copied: bool) -> None:
        self._copies = [copy for copy in self._copies if copy not in copies]
        for copy in copies:
            if not copied:
                copy.sequence.rebind(copy.at, copy.source, copy.table)
            self.pool.free([copy.source if copied else copy.target])
        self.counters.copied_blocks += len(copies) if copied else 0

    def turn_of(self, seq: Sequence) -> float:
        """The turn of a sequence, accepted or not: a moment, to be compared with other sequences' turns."""
        aging = self.limits.priority_aging
        return 0.0 if aging is None else seq.priority.since + seq.priority.level * aging

    def reserve(self, blocks: int, turn: float = 0.0) -> bool:
        """Promises room for a handoff of ``blocks`` blocks, if there is any beyond what the sequences here
        need.

        Refuses while a sequence waits whose turn is not later, so that handoffs cannot starve sequences that
        were preempted.
        """
        if (self.waiting and self.waiting[0].place[0] <= turn) or blocks > self._spare_blocks():
            return False
        self.reserved_blocks += blocks
        return True

    def match_prefix(self, seq: Sequence) -> Hit:
        """The cached pages of a sequence, each with a reference for the caller."""
        if not self.limits.shares(seq):
            return NOTHING
        seq.extend_hashes(self.pool.block_size, self.pool.kv_dtype)
        return self.cache.restore(self.cache.find(seq.hashes), seq.hashes)

    def bind_arriving(self, seq: Sequence) -> Arriving | None:
        """Binds the pages of a sequence that is to arrive by handoff with the KV of all its tokens: of each
        group the blocks that a token to come sees, each with a reference for the caller. None, and no change,
        if too few are allocatable."""
        found = self._find_arriving(seq)
        groups: list[ArrivingGroup] = []
        for group, cached in zip(self.layout.groups, found, strict=True):
            blocks = needed_blocks(group, seq.num_tokens, self.pool.block_size)
            missing = [block for block in blocks if block not in cached]
            fresh = self._fresh(group, len(missing))
            if fresh is None:
                for other in groups:
                    self.pool.free(other.pages)
                for rest in found[len(groups) :]:
                    self.pool.free([page for pages in rest.values() for page in pages])
                return None
            whole = cached | dict(zip(missing, fresh, strict=True))
            pages = tuple(page for block in blocks for page in whole[block])
            groups.append(ArrivingGroup(group, blocks.start, pages, runs_of(missing)))
        return Arriving(tuple(groups))

    def _fresh(self, group: KVGroup, blocks: int) -> list[tuple[int, ...]] | None:
        """New pages for so many blocks of a group; those of one table are adjacent where they can be."""
        width = len(group.tables)
        if blocks * width > self.pool.num_allocatable:
            return None
        tables = [self.pool.allocate(blocks) or [] for _ in range(width)]
        return list(zip(*tables, strict=True))

    def _find_arriving(self, seq: Sequence) -> list[dict[int, tuple[int, ...]]]:
        """The cached pages of each group's blocks, by block, with a reference on each. Groups need not have
        equally many, as all KV but these arrives; a state always arrives."""
        found: list[dict[int, tuple[int, ...]]] = [{} for _ in self.layout.groups]
        if not self.limits.shares(seq):
            return found
        hit = self.match_prefix(seq)
        for number, (group, of_group) in enumerate(zip(self.layout.groups, hit.groups, strict=False)):
            needed = needed_blocks(group, seq.num_tokens, self.pool.block_size)
            for block, pages in enumerate(of_group.pages, of_group.first):
                if pages is not None and group is not self.layout.state and block in needed:
                    found[number][block] = pages
                elif pages is not None:
                    self.pool.free(pages)
        for number, group in enumerate(self.layout.token_groups):
            for block in needed_blocks(group, seq.num_tokens, self.pool.block_size):
                if block < len(seq.hashes) and block not in found[number]:
                    known = self.pool.pages_of(key_of(seq.hashes[block], number))
                    if known is None:
                        break
                    self.pool.ref(known)
                    found[number][block] = known
        return found

    # -- one step ----------------------------------------------------------------------------------------

    def schedule(
        self, drafts: Mapping[Sequence, Items[int]] = MappingProxyType({}), *, ahead: bool = False
    ) -> ScheduledBatch:
        """Chooses the next step and binds its blocks. Empty if nothing can go on (or nothing is there).
        ``drafts``: tokens that may follow the last one of sequences that decode; as many are kept as there is
        room for.

        ``ahead``: a step is under way. Its tokens count as there, but sequences that it may end, or to which
        it may do more than add a token, are left out (``_waits``). Nothing is preempted, as kernels may still
        write to its blocks; ``ScheduledBatch.starved`` says whether that would have been the thing to do.
        """
        self._ahead, self._starved = ahead, False
        copied_before = len(self._copies)
        self._share_out_seats()
        preemptions = self.counters.preemptions
        decodes: list[Sequence] = []
        begun: list[Sequence] = []
        for seq in self.running:
            # Seq.num_uncomputed, without the call: this is every sequence of every step.
            uncomputed = len(seq.token_ids) + seq.num_pending - seq.num_computed - seq.num_under_way
            if seq in self._lost_states:
                continue  # it begins anew when the step under way is over
            if uncomputed and not (seq.num_pending and self._waits(seq)):  # 0: it waits for its mates
                (decodes if uncomputed == 1 else begun).append(seq)
        plan: dict[Sequence, int] = {}
        self._plan_decodes(decodes, plan)
        decoding = len(plan)
        budget = self._prompt_budget(decoding)
        self._plan_begun_prefills(begun, plan, budget)
        if self.counters.preemptions == preemptions and not self._starved:
            self._plan_waiting(plan, budget - (sum(plan.values()) - decoding))
        while not (plan or ahead) and self._make_room():
            self._plan_waiting(plan, self.limits.max_num_batched_tokens)
        kept = self._plan_drafts(drafts, plan)
        singles: list[Scheduled] = []
        chunks: list[Scheduled] = []
        for seq, num_new in plan.items():
            start = seq.num_computed + seq.num_under_way
            chooses = start + num_new >= len(seq.token_ids) + seq.num_pending
            (singles if num_new == 1 else chunks).append(Scheduled(seq, num_new, start, chooses))
        copies = tuple(self._copies[copied_before:])
        items = (*singles, *chunks)
        moves = self._moves(items, kept) if self.states.pages else ()
        return ScheduledBatch(items, len(singles), copies, kept, self._starved, moves)

    def _moves(self, items: Items[Scheduled], drafts: Mapping[Sequence, Items[int]]) -> tuple[StateMove, ...]:
        return tuple(
            self.states.move(
                seq,
                start,
                num_new,
                len(drafts.get(seq, ())),
                self._spare_blocks if self.limits.shares(seq) else None,
            )
            for seq, num_new, start, _ in items
        )

    @staticmethod
    def _waits(seq: Sequence) -> bool:
        """Whether a sequence with a pending token has to wait for it: because it ends with it or is held, or
        because forks branch off, or beams are chosen by it."""
        return (
            seq.num_tokens + seq.num_pending >= seq.max_len
            or seq.hold_after_prefill
            or seq.num_candidates > 0
            or (bool(seq.forks) and not seq.output_ids)
        )

    def _share_out_seats(self) -> None:
        """Gives the seats to the first in order of the sequences that hold blocks. A sequence that loses its
        seat keeps its blocks."""
        while self.joining:
            if len(self.running) == self.limits.max_num_seqs:
                if self.running[-1].place < self.joining[0].place:
                    break
                if self._ahead:  # the last may be held, or end, with the step under way
                    self._starved = True
                    break
                last = self.running.pop()
                last.status = SequenceStatus.WAITING
                insort(self.joining, last, key=_place)
            self._seat(self.joining.pop(0))

    def _plan_decodes(self, decodes: list[Sequence], plan: dict[Sequence, int]) -> None:
        refs, size, stateless = self.pool.refs, self.pool.block_size, not self.states.pages
        for seq in decodes:
            if seq.status is not SequenceStatus.RUNNING:
                continue
            index = (seq.num_computed + seq.num_under_way) // size
            has_room = index < len(seq.block_ids) and refs(seq.block_ids[index]) == 1
            if (has_room and (stateless or self.states.ready(seq))) or self._bind(seq, 1, plan):
                plan[seq] = 1

    def _prompt_budget(self, decoding: int) -> int:
        """Most tokens of prompts in a step that decodes ``decoding`` sequences."""
        left = self.limits.max_num_batched_tokens - decoding
        mixed = self.limits.mixed_prefill_tokens
        return min(left, mixed) if mixed and decoding and self.limits.chunked_prefill else left

    def _plan_begun_prefills(self, begun: list[Sequence], plan: dict[Sequence, int], budget: int) -> None:
        first = True
        for seq in begun:
            if seq.status is not SequenceStatus.RUNNING:
                continue  # preempted just now
            want = self._chunk(seq.num_uncomputed, budget, first)
            if want == 0:
                break
            granted = self._bind(seq, want, plan)
            if granted:
                plan[seq] = granted
                budget -= granted
                first = False

    def _plan_waiting(self, plan: dict[Sequence, int], budget: int) -> None:
        first = all(num_new == 1 for num_new in plan.values())
        while self.waiting and budget > 0 and len(self.running) < self.limits.max_num_seqs:
            seq = self.waiting[0]
            if any(mate.status is SequenceStatus.RUNNING and mate.num_missing > 1 for mate in seq.mates):
                break  # it will share the blocks that its mate is computing
            granted = self._start(seq, budget, first)
            if granted == 0:
                break
            plan[seq] = granted
            budget -= granted
            first = first and granted == 1

    def _make_room(self) -> bool:
        """Preempts the last sequence that holds blocks if it is behind the first waiting one, when beams that
        wait for their mates may be all there is. False if there is no such sequence."""
        holders = self.joining or self.running
        if not self.waiting or not holders or holders[-1].place < self.waiting[0].place:
            return False
        if not any(seq.mates for seq in (*self.running, *self.joining)):
            return False
        self._preempt(holders.pop())
        return True

    def _plan_drafts(
        self, drafts: Mapping[Sequence, Items[int]], plan: dict[Sequence, int]
    ) -> dict[Sequence, Items[int]]:
        """Grants drafts what the sequences have left of budget and blocks: no sequence waits, or is
        preempted, for a guess. Their blocks go back after the step (``accept_drafts``)."""
        kept: dict[Sequence, Items[int]] = {}
        if not drafts:
            return kept
        budget = self.limits.max_num_batched_tokens - sum(plan.values())
        spare = self._spare_blocks()
        for seq, tokens in drafts.items():
            if plan.get(seq) != 1 or not self.may_draft(seq):
                continue
            bound = len(seq.block_ids)
            room = bound * self.pool.block_size - seq.num_tokens
            want = min(len(tokens), budget)
            if self.states.pages:
                want = min(want, max(0, spare) // self.states.pages)
                spare -= want * self.states.pages
            if want > room:
                missing = min(self._blocks_for(want - room), max(0, spare) // self._tables)
                self._add_blocks(seq, missing)
                spare -= (len(seq.block_ids) - bound) * self._tables
                want = min(want, len(seq.block_ids) * self.pool.block_size - seq.num_tokens)
            if want > 0:
                want = self.states.add_drafts(seq, want)
            if want > 0:
                kept[seq] = tokens[:want]
                plan[seq] += want
                budget -= want
        return kept

    def _start(self, seq: Sequence, budget: int, first: bool) -> int:
        """Moves the first waiting sequence to a seat if the pool has room for all its tokens, with whatever
        prefix is cached. Returns the tokens it computes in this step, 0 if it stays."""
        pool = self.pool
        total = self.counts.of(seq.num_tokens)
        hashes: list[bytes] = []
        if self.limits.shares(seq):
            seq.extend_hashes(pool.block_size, pool.kv_dtype)
            hashes = seq.hashes[: seq.num_reusable // pool.block_size]
        if total - len(hashes) * self._tables > self._spare_blocks() and not seq.mates:
            return 0
        hit = self._hit_with_room(seq, total, hashes)
        if hit is None:
            return 0
        want = self._chunk(seq.num_tokens - hit.num_blocks * pool.block_size, budget, first)
        if want == 0:
            self.cache.drop(hit)
            return 0
        in_pool = len(hit.held)
        hit = self.cache.restore(hit, hashes)
        self.counters.swapped_in += seq.preemptions > 0 and in_pool < len(hit.held)
        self._dequeue(seq)
        self._seat(seq)
        self._take_hit(seq, hit)
        if seq.preemptions == 0 and self.limits.prefix_caching:
            seq.num_cached = seq.num_computed
            self.counters.prefix_queried_tokens += seq.num_tokens
            self.counters.prefix_hit_tokens += seq.num_computed
        return self._grow(seq, want)

    def _hit_with_room(self, seq: Sequence, total: int, hashes: Items[bytes]) -> Hit | None:
        """What is cached of a waiting sequence of ``total`` pages, with a reference on each page; nothing
        where there is room only without it, and None where there is none."""
        hit = self._of_mates(seq) or self.cache.find(hashes)
        # A state that others find must not be written to: another one is needed.
        more = self.states.pages if hit.num_blocks else 0
        if total - len(hit.held) + more <= self._spare_blocks():
            return hit
        self.cache.drop(hit)
        return NOTHING if more and total <= self._spare_blocks() else None

    def _take_hit(self, seq: Sequence, hit: Hit) -> None:
        """Binds what the cache has to a sequence without pages, which goes on behind it."""
        seq.lay_out(self._tables)
        for number, (group, found) in enumerate(zip(self.layout.groups, hit.groups, strict=False)):
            if group is self.layout.state:
                [state] = found.pages
                assert state is not None
                seq.state_pages, seq.keeps_state = array("q", state), True
                continue
            for at, table in enumerate(group.tables):
                seq.tables[table].extend([GONE] * found.first)
                seq.tables[table].extend(pages[at] for pages in found.pages if pages is not None)
            if found.first:
                seq.gone[number] = found.first
        seq.num_computed = hit.num_blocks * self.pool.block_size
        seq.num_indexed = hit.num_blocks

    def _chunk(self, uncomputed: int, budget: int, first: bool) -> int:
        """How many of a sequence's ``uncomputed`` tokens it may compute in this step. An unchunked prompt
        above the budget is taken as the step's first prefill, or it would never run."""
        if self.limits.chunked_prefill:
            return min(uncomputed, self.limits.prefill_chunk, budget)
        return uncomputed if first or uncomputed <= budget else 0

    # -- blocks ------------------------------------------------------------------------------------------

    def _bind(self, seq: Sequence, want: int, plan: dict[Sequence, int]) -> int:
        """Binds blocks for up to ``want`` more tokens of a running sequence, preempting from the end of the
        order if not even one fits. Returns the tokens that have blocks; 0 if it must pause."""
        while True:
            granted = self._grow(seq, want)
            if granted:
                return granted
            if self._ahead:
                self._starved = True
                return 0
            if self.joining:  # all of them are behind every sequence with a seat
                victim = self.joining.pop()
            elif self.running[-1] is not seq:
                victim = self.running.pop()
                plan.pop(victim, None)
            else:
                return 0
            self._preempt(victim)

    def _of_mates(self, seq: Sequence) -> Hit | None:
        """The blocks of the longest prefix that a mate of a beam that comes back has computed, with a
        reference taken on each; None if there are none. Of states there is only the last one."""
        if self.states.pages:
            return None
        longest, found = 0, None
        for mate in seq.mates:
            alike = min(seq.num_common(mate), mate.num_computed, seq.num_tokens - 1) // self.pool.block_size
            if mate is not seq and alike > longest and self._shows(mate, alike):
                longest, found = alike, mate
        if found is None:
            return None
        groups = [self._shown(found, group, longest) for group in self.layout.groups]
        hit = Hit(longest, tuple(groups))
        self.pool.ref(hit.held)
        return hit

    def _shows(self, seq: Sequence, blocks: int) -> bool:
        """Whether a sequence still has all of its first ``blocks`` blocks that a token behind them sees."""
        tokens = blocks * self.pool.block_size
        return all(
            seq.num_gone(number) <= self.counts.first_seen(group, tokens) for number, group in self._windows
        )

    def _shown(self, seq: Sequence, group: KVGroup, blocks: int) -> GroupHit:
        first = self.counts.first_seen(group, blocks * self.pool.block_size)
        tables = [seq.tables[table][first:blocks] for table in group.tables]
        return GroupHit(first, list(zip(*tables, strict=True)))

    def _grow(self, seq: Sequence, want: int) -> int:
        """Binds as many as the pool has of the blocks for ``want`` more tokens; all or nothing when
        unchunked."""
        if not self.states.ready(seq) or not self._own_tail(seq):
            return 0
        room = len(seq.block_ids) * self.pool.block_size - seq.num_scheduled
        if want > room:
            missing = self._blocks_for(want - room)
            if self.limits.chunked_prefill:
                missing = min(missing, self.pool.num_allocatable // self._tables)
            if not self._add_blocks(seq, missing):
                return 0
            room += missing * self.pool.block_size
        return min(want, room)

    def _add_blocks(self, seq: Sequence, count: int) -> bool:
        """Binds ``count`` more blocks, all or none; False if the pool has too few pages."""
        if count * self._tables > self.pool.num_allocatable:
            return False
        seq.lay_out(self._tables)
        for table in seq.tables:
            after = table[-1] if table and table[-1] != GONE else None
            table.extend(self.pool.allocate(count, after=after) or ())
        return True

    def _own_tail(self, seq: Sequence) -> bool:
        """Sees that no other sequence refers to the block that the next token goes into; False if the pool
        has no block left for a copy."""
        index = seq.num_scheduled // self.pool.block_size
        if index >= len(seq.block_ids) or not self._shared(seq.block_ids[index]):
            return True
        targets = self.pool.allocate(self._tables)
        if targets is None:
            return False
        for table, target in enumerate(targets):
            source = seq.tables[table][index]
            seq.rebind(index, target, table)
            self._copies.append(Copy(seq, index, source, target, table))
        return True

    def _shared(self, block: int) -> bool:
        references = self.pool.refs(block)
        return references > 1 and references - sum(copy.source == block for copy in self._copies) > 1

    def _spare_blocks(self) -> int:
        """Allocatable blocks that no sequence here is about to need: prompts begun will need the rest of
        their blocks, and decoding sequences one to grow. A sequence that started in these would soon be
        preempted."""
        taken = self.reserved_blocks
        if self._keeps_blocks:
            for seq in (*self.running, *self.joining):
                tokens = seq.num_tokens + seq.num_pending
                taken += self._blocks_for(tokens) - len(seq.block_ids) + (not seq.hold_after_prefill)
        else:
            for seq in (*self.running, *self.joining):
                taken += self._missing_pages(seq)
        return self.pool.num_allocatable - taken

    def _missing_pages(self, seq: Sequence) -> int:
        """The pages that a sequence is about to need, besides those that it has."""
        growth = 0 if seq.hold_after_prefill else self._tables
        if self.states.pages and seq.keeps_state and not seq.next_state:
            growth += self.states.pages
        total = seq.num_tokens + seq.num_pending
        if seq.num_uncomputed <= 1:  # windows move on from here
            return growth + self._tables * (self._blocks_for(total) - len(seq.block_ids))
        return growth + max(0, self.counts.of(total) - self._held_pages(seq))

    def _held_pages(self, seq: Sequence) -> int:
        held = len(seq.block_ids) * self._tables + (self.states.pages if seq.state_pages else 0)
        return held - sum(seq.num_gone(number) * len(group.tables) for number, group in self._windows)

    def _preempt(self, seq: Sequence) -> None:
        """Sends a sequence, already taken off its queue, back to wait without blocks."""
        self._drop_copies(seq)
        self._give_up_pages(seq)
        seq.num_computed = seq.num_indexed = 0
        seq.preemptions += 1
        self.counters.preemptions += 1
        self._enqueue(seq)

    def _drop_copies(self, seq: Sequence) -> None:
        """Forgets the copies of a sequence that loses its blocks: the targets may be other sequences' before
        the step begins, and must not be written then."""
        dropped = [copy.source for copy in self._copies if copy.sequence is seq]
        if dropped:
            self._copies = [copy for copy in self._copies if copy.sequence is not seq]
            self.pool.free(dropped)

    def _index_full_blocks(self, seq: Sequence) -> None:
        full = seq.num_computed // self.pool.block_size
        if full == seq.num_indexed or not self.limits.shares(seq):
            return
        # A sequence that was cancelled with two steps under way has computed a token that it was never given.
        full = min(full, seq.num_tokens // self.pool.block_size)
        seq.extend_hashes(self.pool.block_size, self.pool.kv_dtype)
        for i in range(seq.num_indexed, full):
            if self._keeps_blocks:
                self.pool.commit(seq.block_ids[i], seq.hashes[i])
            else:
                self._index_block(seq, i)
        seq.num_indexed = full

    def _index_block(self, seq: Sequence, block: int) -> None:
        for number, group in enumerate(self.layout.token_groups):
            pages = tuple(seq.tables[table][block] for table in group.tables)
            if pages[0] != GONE and block != seq.partial.get(number):
                self.pool.commit_pages(pages, key_of(seq.hashes[block], number))

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.block_size)

    # -- queues, all in order ----------------------------------------------------------------------------

    def check(self, seq: Sequence) -> None:
        """Checks a sequence. ValueError, naming the numbers, if it could never produce a token here."""
        name = f"request {seq.request_id}"
        pool_tokens = self.longest_sequence
        if not seq.prompt_ids:
            raise ValueError(f"{name}: the prompt is empty")
        if seq.num_outputs >= seq.params.max_tokens:
            raise ValueError(
                f"{name}: max_tokens is {seq.params.max_tokens} and {seq.num_outputs} outputs were given"
            )
        if seq.num_tokens + 1 > self.limits.max_model_len:
            raise ValueError(
                f"{name}: {seq.num_tokens} tokens and one more exceed max_model_len "
                f"{self.limits.max_model_len}"
            )
        if seq.priority.level and self.limits.priority_aging is None:
            raise ValueError(
                f"{name}: priority is {seq.priority.level}; allowed: 0, as this worker's scheduling policy "
                "is fcfs"
            )
        if seq.num_tokens + 1 > pool_tokens:
            raise ValueError(
                f"{name}: {seq.num_tokens} tokens and one more exceed the KV cache of {pool_tokens} tokens "
                f"({self.pool.num_blocks} {self._pages_are})"
            )
        if seq.params.beam_search is not None:
            self._check_beams(seq, seq.params.beam_search.width)

    def _check_beams(self, seq: Sequence, width: int) -> None:
        """Checks that the beams, all as long as they may become, could be here together. They share the
        prompt's full blocks; each is granted one block to grow into (``_spare_blocks``). BeamsDoNotFitError
        if not."""
        if width > self.limits.max_num_seqs:
            raise BeamsDoNotFitError(
                f"a beam search of {width} beams does not fit: this worker runs at most "
                f"{self.limits.max_num_seqs} sequences at once"
            )
        longest = min(seq.num_prompt + seq.params.max_tokens, self.limits.max_model_len)
        if self._keeps_blocks:
            shared = seq.num_prompt // self.pool.block_size
            needed = shared + width * (self._blocks_for(longest) - shared + 1)
        else:
            needed = width * (self.counts.of(longest) + self._tables + self.states.pages)
        if needed > self.pool.num_blocks:
            raise BeamsDoNotFitError(
                f"a beam search of {width} beams with up to {longest} tokens each does not fit: it needs "
                f"{needed} blocks of the KV cache, which has {self.pool.num_blocks}; ask for fewer beams or "
                "a smaller max_tokens"
            )

    def accept(self, seq: Sequence) -> None:
        """Checks a new sequence against the limits, and gives it its place in the order. ValueError as for
        :meth:`check`. It is to be queued, or to join, next."""
        self.check(seq)
        pool_tokens = self.longest_sequence
        seq.lay_out(self._tables)
        wanted = seq.num_prompt + seq.params.max_tokens
        seq.max_len = min(wanted, self.limits.max_model_len, pool_tokens)
        seq.arrival = self._arrivals
        seq.place = (self.turn_of(seq), seq.arrival)
        width = 0 if seq.params.beam_search is None else seq.params.beam_search.width
        self._arrivals += max(1 + len(seq.forks), width)

    def _enqueue(self, seq: Sequence) -> None:
        seq.status = SequenceStatus.WAITING
        insort(self.waiting, seq, key=_place)
        seq.num_expected = seq.num_tokens - self._cached_tokens(seq)
        self._waiting_tokens += seq.num_expected

    def _dequeue(self, seq: Sequence) -> None:
        self._remove(self.waiting, seq)
        self._waiting_tokens -= seq.num_expected

    def _cached_tokens(self, seq: Sequence) -> int:
        """Leading tokens that the prefix cache has at this moment."""
        return (
            self.cache.longest(seq.hashes[: seq.num_reusable // self.pool.block_size]) * self.pool.block_size
        )

    def _seat(self, seq: Sequence) -> None:
        seq.status = SequenceStatus.RUNNING
        insort(self.running, seq, key=_place)

    @staticmethod
    def _remove(queue: list[Sequence], seq: Sequence) -> None:
        del queue[bisect_left(queue, seq.place, key=_place)]


def _place(seq: Sequence) -> tuple[float, int]:
    return seq.place
