"""What travels of each KV group: the blocks that a token behind the prompt needs."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace

import pytest

from baton.core.attempt_failure import AttemptFailure
from baton.core.sampling_params import ResolvedSampling
from baton.engine.kv.arriving import Arriving, ArrivingGroup, first_seen, needed_blocks, runs_of
from baton.engine.sampling.beams import Candidates
from baton.engine.sequence import Sequence
from baton.handoff.blocks import GroupBlocks
from baton.handoff.decode import DecodeHandoffs
from baton.handoff.messages import (
    Action,
    Ask,
    Commit,
    Credit,
    Fail,
    First,
    Grant,
    LinkId,
    Manifest,
    Name,
    PostReceive,
    Ready,
    Segment,
    Send,
    SendBlocks,
    SendComplete,
)
from baton.handoff.prefill import Computed, PrefillHandoffs
from baton.roles.decode_room import PoolRoom
from baton.roles.engine_pages import KeptPages
from baton.roles.group_blocks import finished_blocks, wanted_blocks
from baton.transport.block_names import group_of, names_of, page_of, pages_of, place_of, state_names
from baton_kernels.kv_layout import KVGroup, KVLayout, StateKV, TokenKV
from baton_kernels.window import ChunkedWindow

FULL = KVGroup(TokenKV(2, 2, 4), (0,), range(1), 1)
WINDOW = KVGroup(TokenKV(2, 2, 4, window=20), (1, 2, 3), range(1, 3), 2)
STATE = KVGroup(StateKV(4, 8), (4,), range(3, 5), 2)
GROUPS = (FULL, WINDOW, STATE)
NAME, LINK = Name("r", 0), LinkId("p", "d", 1)


def base(group: int) -> int:
    return group << 40


@pytest.mark.parametrize(
    ("window", "position", "first"),
    [
        (None, 90, 0),
        (20, 10, 0),
        (20, 90, 71),
        (1, 90, 90),
        (ChunkedWindow(32), 90, 64),
        (ChunkedWindow(32), 96, 96),
    ],
)
def test_what_a_query_sees(window: int | ChunkedWindow | None, position: int, first: int) -> None:
    assert first_seen(window, position) == first


def test_only_what_the_next_token_sees_is_needed() -> None:
    assert wanted_blocks(GROUPS, 90, 16) == (range(6), range(4, 6), range(1))
    assert wanted_blocks(GROUPS, 10, 16) == (range(1), range(1), range(1))
    chunked = replace(FULL, kv=TokenKV(2, 2, 4, window=ChunkedWindow(32)))
    assert needed_blocks(chunked, 96, 16) == range(6, 6), "a run that begins has seen nothing"


def test_names_tell_group_page_and_place() -> None:
    assert names_of(0, (5, 7), 1, 1) == (5, 7), "as it was before there were groups"
    assert names_of(0, (5, 7), 1, 2) == (10, 11, 14, 15)
    names = names_of(3, (5, 9, 7, 2), 2, 2)
    assert [place_of(name) for name in names] == [10, 18, 11, 19, 14, 4, 15, 5]
    assert {group_of(name) for name in names} == {3}
    assert [page_of(name, 2) for name in names] == [5, 9, 5, 9, 7, 2, 7, 2]
    assert pages_of(names, 2) == (5, 9, 7, 2)
    assert pages_of(state_names(3, (5, 9), 4), 4) == (5, 9)


def test_runs() -> None:
    assert runs_of([]) == ()
    assert runs_of([1, 2, 3, 7, 9, 10]) == (range(1, 4), range(7, 8), range(9, 11))


def test_what_prefill_has_finished() -> None:
    tables = ([3, 4, 5], [0, 6, 7], [0, 8, 9])
    chunk = finished_blocks(GROUPS, tables, (1, 2), (0, 1, 0), 2, 1, whole=False)
    assert chunk[0] == GroupBlocks((3, 4))
    assert chunk[1] == GroupBlocks((base(1) + 6, base(1) + 8), 1, 2)
    assert chunk[2] == GroupBlocks((), 0, 2), "the state is not yet the one to hand on"
    whole = finished_blocks(GROUPS, tables, (1, 2), (0, 1, 0), 3, 1, whole=True)
    assert [group.end for group in whole] == [3, 3, 1]
    assert whole[2] == GroupBlocks((base(2) + 1, base(2) + 2), 0, 2)
    small = finished_blocks(GROUPS, tables, (1, 2), (0, 1, 0), 5, 2, whole=False)
    assert small[1] == GroupBlocks(tuple(base(1) + n for n in (12, 16, 13, 17, 14, 18)), 2, 2)


class Pages:
    """``EnginePages`` of a worker whose pages are handed out in order."""

    def __init__(self, block_size: int, cached: dict[int, list[range]] | None = None) -> None:
        self.layout = KVLayout(GROUPS, block_size, 2, 1 << 10)
        self.cached = cached or {}
        """The runs of blocks of each group that the prefix cache has."""
        self.reserved: list[int] = []
        self.pinned: list[int] = []
        self.freed: list[int] = []

    def fits(self, num_tokens: int) -> bool:
        return num_tokens < 1000

    def reserve(self, num_tokens: int, turn: float) -> bool:
        self.reserved.append(num_tokens)
        return True

    def unreserve(self, num_tokens: int) -> None:
        self.reserved.remove(num_tokens)

    def bind_arriving(self, seq: Sequence) -> Arriving | None:
        bound, page = [], 100
        for number, group in enumerate(GROUPS):
            needed = needed_blocks(group, seq.num_tokens, self.layout.block_size)
            count = len(needed) * len(group.tables)
            have = {block for run in self.cached.get(number, []) for block in run}
            fresh = runs_of(block for block in needed if block not in have)
            bound.append(ArrivingGroup(group, needed.start, tuple(range(page, page + count)), fresh))
            page += 100
        return Arriving(tuple(bound))

    def pin(self, pages: Many[int]) -> None:
        self.pinned += pages

    def unpin(self, pages: Many[int]) -> None:
        for page in pages:
            self.pinned.remove(page)

    def free_pages(self, pages: Many[int]) -> None:
        self.freed += pages

    def kept(self, seq: Sequence) -> KeptPages:
        raise AssertionError("this is decode")

    def admit_forked(self, answers: list[Sequence], arriving: Arriving) -> dict[Sequence, str]:
        raise AssertionError("nothing joins here")

    def admit_beams(self, seq: Sequence, candidates: Candidates, arriving: Arriving) -> None:
        raise AssertionError("nothing joins here")


def bound(pages: Pages, num_tokens: int, per_page: int) -> tuple[PoolRoom, DecodeHandoffs, list[Action]]:
    """A decode worker that has just posted its receives for a prompt of so many tokens."""
    room = PoolRoom(pages, lambda _: 0.0)
    machine = DecodeHandoffs("d", room, drained_is_proof=False)
    link = machine.open_link("p", per_page)
    assert link == LINK
    sequence = Sequence("r", 0, list(range(num_tokens)), ResolvedSampling(max_tokens=4))
    room.expect(NAME, sequence, (num_tokens, b"digest", 1))
    machine.receive(LINK, Ask(NAME, num_tokens), 0.0)
    assert pages.reserved == [num_tokens]
    return room, machine, machine.receive(LINK, Ready(NAME), 0.0)


def test_decode_asks_for_what_it_lacks_and_needs() -> None:
    pages = Pages(16, {0: [range(2)], 1: [range(5, 6)]})
    room, machine, actions = bound(pages, 90, 1)
    posted = {action.tag: action.blocks for action in actions if isinstance(action, PostReceive)}
    assert posted == {
        1: (102, 103, 104, 105),
        2: (base(1) + 200, base(1) + 201),
        3: (base(2) + 300, base(2) + 301),
    }
    segments = (Segment(1, 2, 4), Segment(2, 4, 1, 1), Segment(3, 0, 1, 2))
    assert actions[-1] == Send(LINK, Grant(NAME, segments))
    assert pages.pinned == [102, 103, 104, 105, 200, 201, 300, 301]
    assert pages.reserved == []
    for tag in posted:
        machine.received(LINK, tag, True, 0.0)
    complete = SendComplete(NAME, Manifest(90, b"digest", 3), (First(7),))
    commit = next(a for a in machine.receive(LINK, complete, 0.0) if isinstance(a, Commit))
    assert sorted(commit.binding.pages) == [100, 101, 102, 103, 104, 105, 200, 201, 202, 203, 300, 301]
    assert pages.pinned == []
    arriving = room.bound(NAME)
    assert [list(table) for table in arriving.tables()] == [
        [100, 101, 102, 103, 104, 105],
        [0, 0, 0, 0, 200, 202],
        [0, 0, 0, 0, 201, 203],
    ]
    assert list(arriving.state_pages()) == [300, 301]
    assert not any(group.partial for group in arriving.groups)


def test_a_page_whose_beginning_nobody_sees_is_said_to_be_partial() -> None:
    pages = Pages(64)
    room, _, actions = bound(pages, 90, 4)
    grant = actions[-1]
    assert isinstance(grant, Send) and isinstance(grant.message, Grant)
    runs = [(s.group, s.first_block, s.num_blocks) for s in grant.message.segments]
    assert runs == [(0, 0, 6), (1, 4, 2), (2, 0, 1)]
    assert [group.partial for group in room.bound(NAME).groups] == [False, False, False], (
        "block 4 begins page 1"
    )
    room, _, actions = bound(Pages(64), 101, 4)
    assert [group.partial for group in room.bound(NAME).groups] == [False, True, False]
    cached = Pages(64, {1: [range(1, 2)]})
    room, _, _ = bound(cached, 101, 4)
    assert not any(group.partial for group in room.bound(NAME).groups), "what is cached is whole"


def test_all_comes_back_when_a_handoff_ends() -> None:
    pages = Pages(16)
    _, machine, actions = bound(pages, 90, 1)
    machine.cancel(NAME, 0.0)
    for action in actions:
        if isinstance(action, PostReceive):
            machine.received(LINK, action.tag, False, 0.0)
    assert pages.pinned == []
    assert len(pages.freed) == 6 + 2 * 2 + 2


class Sources:
    """``SourcePages`` of one request."""

    def __init__(self) -> None:
        self.finished_groups: tuple[GroupBlocks, ...] = ()
        self.pinned: list[int] = []

    def finished(self, name: Name, blocks_per_page: int) -> tuple[GroupBlocks, ...]:
        return self.finished_groups

    def pin(self, pages: tuple[int, ...]) -> None:
        self.pinned += pages

    def unpin(self, pages: tuple[int, ...]) -> None:
        for page in pages:
            self.pinned.remove(page)


def asked(source: Sources) -> PrefillHandoffs:
    machine = PrefillHandoffs(source)
    machine.link_opened(LINK)
    machine.ask(NAME, LINK, 90, wanted_blocks(GROUPS, 90, 16), 0.0)
    machine.receive(LINK, Credit(NAME), 0.0)
    return machine


def test_prefill_sends_each_group_when_it_is_finished() -> None:
    source = Sources()
    machine = asked(source)
    tables = ([3, 4, 5, 6, 7, 8], [0, 0, 0, 0, 10, 11], [0, 0, 0, 0, 12, 13])

    def finish(count: int, *, whole: bool) -> list[int]:
        source.finished_groups = finished_blocks(GROUPS, tables, (1, 2), (0, 4, 0), count, 1, whole=whole)
        done = Computed(90, b"digest", (First(7),), 0)
        actions = machine.computed(NAME, done) if whole else machine.progress(NAME)
        return [action.tag for action in actions if isinstance(action, SendBlocks)]

    granted = (Segment(1, 2, 4), Segment(2, 4, 1, 1), Segment(3, 5, 1, 1), Segment(4, 0, 1, 2))
    assert finish(4, whole=False) == []
    assert machine.receive(LINK, Grant(NAME, granted), 0.0) == []
    assert finish(5, whole=False) == [2]
    assert source.pinned == [10, 12]
    assert finish(6, whole=True) == [1, 3, 4]
    assert sorted(source.pinned) == [1, 2, 5, 6, 7, 8, 10, 11, 12, 13]
    for tag in (1, 2, 3, 4):
        machine.sent(LINK, tag, True, 0.0)
    assert source.pinned == []


@pytest.mark.parametrize(
    ("segment", "reason"),
    [
        (Segment(1, 0, 1, 3), "blocks of KV group 3, of 3"),
        (
            Segment(1, 3, 2, 1),
            "KV blocks 3 to 4 of group 1, of which the request has 4 to 5",
        ),
        (
            Segment(1, 5, 2, 1),
            "KV blocks 5 to 6 of group 1, of which the request has 4 to 5",
        ),
        (
            Segment(1, 0, 2, 2),
            "KV blocks 0 to 1 of group 2, of which the request has 0 to 0",
        ),
        (Segment(1, 0, 0, 2), "a segment without blocks"),
    ],
    ids=["unknown group", "given back", "never computed", "two states", "empty"],
)
def test_blocks_that_prefill_will_never_have_are_refused(segment: Segment, reason: str) -> None:
    machine = asked(Sources())
    first = machine.receive(LINK, Grant(NAME, (segment,)), 0.0)[0]
    assert isinstance(first, Fail)
    assert first.failure is AttemptFailure.HANDOFF_LOST
    assert first.reason.removesuffix(" to send") == f"decode granted {reason}"
    assert machine.open_handoffs == 0
