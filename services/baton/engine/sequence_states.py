"""The states of sequences in pages: which a step reads, which it writes, and which are kept as snapshots.

A sequence has one live state, behind its scheduled tokens. A step reads it and writes the state behind its
own tokens: in place if nobody else can find it, else into new pages. A *snapshot* is a state at a block
boundary that the prefix index finds; its pages are never written to again. Snapshots are kept behind the last
whole block of what a sequence begins with, and about every ``INTERVAL`` tokens; only where pages are to
spare, and they are given away like other cached pages.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from baton.engine.kv.block_pool import BlockPool
from baton.engine.kv.prefix_cache import key_of
from baton.engine.sequence import Sequence

INTERVAL = 1024
"""Tokens between two snapshots of a sequence, about."""


@dataclass(frozen=True, slots=True)
class StateRun:
    """Tokens of one sequence behind which a step writes the state."""

    num_tokens: int
    target: array[int]
    block: int = 0
    """The number of whole blocks in front of it, if it is kept as a snapshot; 0: it is not."""


@dataclass(frozen=True, slots=True)
class StateMove:
    """What one step does with the state of one sequence."""

    sequence: Sequence
    source: array[int]
    """The state that the step begins with; empty: the sequence begins."""
    runs: tuple[StateRun, ...]
    released: array[int]
    """Pages that the sequence gives up; the step may read them."""
    live: int
    """The index of the run behind which the sequence goes on, unless drafts are accepted."""


class SequenceStates:
    """Gives states pages of one pool. Guarded by the engine's lock."""

    def __init__(self, pool: BlockPool, pages: int, group: int) -> None:
        """``pages``: pages of one state; 0: no layer keeps any. ``group``: the index of the state's group."""
        self.pages = pages
        self.group = group
        self._pool = pool
        self._interval = max(1, INTERVAL // pool.block_size)

    def ready(self, seq: Sequence) -> bool:
        """Sees that the next step has pages to write the sequence's state to; False if the pool has none
        left. Pages that it was given, while others shared its state, go back when these are gone."""
        if not self.pages:
            return True
        if self._may_overwrite(seq):
            if seq.next_state:
                self._pool.free(self._take_next(seq))
            return True
        if seq.next_state:
            return True
        pages = self._pool.allocate(self.pages)
        if pages is None:
            return False
        seq.next_state = array("q", pages)
        return True

    def _may_overwrite(self, seq: Sequence) -> bool:
        return bool(seq.state_pages) and not seq.keeps_state and self._pool.refs(seq.state_pages[0]) == 1

    def move(
        self, seq: Sequence, start: int, num_new: int, num_drafts: int, spare: Callable[[], int] | None
    ) -> StateMove:
        """Plans what a step of ``num_new`` tokens from ``start`` on, the last ``num_drafts`` of them drafts,
        does with the state of a sequence that is :meth:`ready`. ``spare`` tells how many pages snapshots may
        take; None: nobody may find any."""
        source, released = seq.state_pages, array("q")
        end = start + num_new - num_drafts
        runs: list[StateRun] = []
        at = start
        for block in self._boundaries(seq, start, end):
            boundary = block * self._pool.block_size
            pages = None if spare is None else self._snapshot_pages(seq, boundary == end, spare)
            if pages is None:
                continue
            runs.append(StateRun(boundary - at, pages, block))
            at = boundary
        if at < end:
            runs.append(StateRun(end - at, self._own_pages(seq)))
        last = len(runs) - 1
        if runs[last].target is not source:
            released = source
        seq.state_pages = runs[last].target
        seq.keeps_state = bool(runs[last].block)
        assert len(seq.draft_states) == num_drafts
        runs += (StateRun(1, pages) for pages in seq.draft_states)
        return StateMove(seq, source, tuple(runs), released, last)

    def _boundaries(self, seq: Sequence, start: int, end: int) -> Items[int]:
        """The numbers of blocks behind which a snapshot is kept, of those that end in (start, end]."""
        size = self._pool.block_size
        last = (seq.num_tokens - 1) // size
        """Whole blocks of what the sequence begins with, its last token left out."""
        found = {block for block in range(start // size + 1, end // size + 1) if block % self._interval == 0}
        if start < last * size <= end:
            found.add(last)
        return sorted(found)

    def _snapshot_pages(self, seq: Sequence, is_last: bool, spare: Callable[[], int]) -> array[int] | None:
        """Pages for a snapshot; None if there are none to spare. The last run of a step takes those that are
        there for it, as the step after it will need others."""
        if spare() < self.pages:
            return None
        if is_last and seq.next_state:
            return self._take_next(seq)
        pages = self._pool.allocate(self.pages)
        return None if pages is None else array("q", pages)

    def _own_pages(self, seq: Sequence) -> array[int]:
        return self._take_next(seq) if seq.next_state else seq.state_pages

    @staticmethod
    def _take_next(seq: Sequence) -> array[int]:
        pages, seq.next_state = seq.next_state, array("q")
        return pages

    def add_drafts(self, seq: Sequence, most: int) -> int:
        """Takes pages for the states behind drafts in the next step, ``most`` at most. Returns for how many
        drafts there are some."""
        while self.pages and len(seq.draft_states) < most:
            pages = self._pool.allocate(self.pages)
            if pages is None:
                return len(seq.draft_states)
            seq.draft_states.append(array("q", pages))
        return most

    def land(self, move: StateMove) -> None:
        """The step is over: enters its snapshots into the index, and gives up what it read last."""
        seq, size = move.sequence, self._pool.block_size
        for number, run in enumerate(move.runs):
            # A sequence cancelled with two steps under way has computed a token that it was never given.
            if run.block and run.block <= seq.num_tokens // size:
                seq.extend_hashes(size, self._pool.kv_dtype)
                self._pool.commit_pages(tuple(run.target), key_of(seq.hashes[run.block - 1], self.group))
                seq.snapshot = run.block
            if run.block and number != move.live:
                self._pool.free(run.target)
        self._pool.free(move.released)

    def given_up(self, seq: Sequence) -> None:
        """Counts the last snapshot of a sequence that gave up its pages as used just now, if it is still
        there: without it, the blocks in front of it are of no use."""
        if seq.snapshot:
            pages = self._pool.pages_of(key_of(seq.hashes[seq.snapshot - 1], self.group))
            if pages is not None:
                self._pool.ref(pages)
                self._pool.free(pages)

    def undo(self, move: StateMove) -> None:
        """The step failed: gives up what it was to write. The sequence's state is lost with it."""
        for number, run in enumerate(move.runs):
            if run.block and number != move.live:
                self._pool.free(run.target)
        self._pool.free(move.released)

    def accept(self, seq: Sequence, num_accepted: int) -> None:
        """Goes on from the state behind the accepted drafts."""
        if not seq.draft_states:
            return
        states = [seq.state_pages, *seq.draft_states]
        seq.state_pages = states.pop(num_accepted)
        if num_accepted:
            seq.keeps_state = False
        for rejected in states:
            self._pool.free(rejected)
        seq.draft_states.clear()
