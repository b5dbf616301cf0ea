"""The longest hit in a cache of several groups, against its definition."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.prefix_hit import WHOLE_PREFIX, GroupNeeds, longest_hit

WINDOWS = st.builds(GroupNeeds, st.just("window"), st.integers(1, 30), st.booleans())
NEEDS = st.one_of(st.builds(GroupNeeds, st.sampled_from(["full", "latent", "state"])), WINDOWS)


def can_go_on(need: GroupNeeds, held: set[int], num_blocks: int, block_size: int) -> bool:
    """Whether a group can compute the token behind a prefix, and all after it, of what is held."""
    end = num_blocks * block_size
    if need.kind == "state":
        return num_blocks == 0 or num_blocks - 1 in held
    seen: set[int] = set()
    for query in range(end, end + 2 * max(1, need.window)):
        if need.kind != "window":
            first = 0
        elif need.chunked:
            first = query // need.window * need.window
        else:
            first = max(0, query - need.window + 1)
        seen.update(token // block_size for token in range(first, query + 1) if token < end)
    return seen <= held


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_is_the_longest_prefix_with_which_every_group_can_go_on(data: st.DataObject) -> None:
    needs = data.draw(st.lists(NEEDS, max_size=4), label="needs")
    block_size = data.draw(st.integers(1, 8), label="block size")
    num_blocks = data.draw(st.integers(0, 12), label="blocks")
    mostly = st.integers(0, 5).map(bool)
    held = [
        {b for b in range(num_blocks) if data.draw(mostly if n.kind != "state" else st.booleans())}
        for n in needs
    ]
    asked: set[tuple[int, int]] = set()

    def has(group: int, block: int) -> bool:
        assert 0 <= block < num_blocks and (group, block) not in asked, "linear: nothing is asked twice"
        asked.add((group, block))
        return block in held[group]

    expected = max(
        n
        for n in range(num_blocks + 1)
        if all(can_go_on(need, own, n, block_size) for need, own in zip(needs, held, strict=True))
    )
    assert longest_hit(needs, block_size, num_blocks, has) == expected


@given(NEEDS, st.integers(0, 40), st.integers(1, 8))
def test_what_is_needed_is_what_is_seen(need: GroupNeeds, num_blocks: int, block_size: int) -> None:
    first = need.first_block(num_blocks, block_size)
    assert 0 <= first <= num_blocks
    assert can_go_on(need, set(range(first, num_blocks)), num_blocks, block_size)
    if first < num_blocks:
        assert not can_go_on(need, set(range(first + 1, num_blocks)), num_blocks, block_size)
    assert first <= need.first_block(num_blocks + 1, block_size)


def test_a_whole_prefix_is_followed_to_the_first_gap_and_no_further() -> None:
    read: list[int] = []

    def has(group: int, block: int) -> bool:
        read.append(block)
        return block != 3

    assert longest_hit(WHOLE_PREFIX, 16, 1000, has) == 3
    assert read == [0, 1, 2, 3]


def test_a_state_is_found_at_its_last_snapshot_within_the_pages() -> None:
    needs = (GroupNeeds("full"), GroupNeeds("state"))
    held = {(0, b) for b in range(7)} | {(1, 4), (1, 8)}
    assert longest_hit(needs, 16, 10, lambda g, b: (g, b) in held) == 5


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_of_nothing_is_refused(window: int) -> None:
    with pytest.raises(ValueError, match=f"a window must be at least 1, not {window}"):
        GroupNeeds("window", window)
    with pytest.raises(ValueError, match="a group of kind full has no window, but was given window 5"):
        GroupNeeds("full", 5)
