"""Pieces of messages, and the room for them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.transport.staging import PIECE_BYTES, StagingBudget, pieces


@given(st.lists(st.integers(0, 99), max_size=30), st.integers(1, 2 * PIECE_BYTES))
def test_pieces_are_the_message_in_order_and_no_larger_than_they_must_be(
    blocks: list[int], block_bytes: int
) -> None:
    some = list(pieces(blocks, block_bytes))
    assert [block for piece in some for block in piece] == blocks
    assert all(len(piece) == 1 or 0 < len(piece) * block_bytes <= PIECE_BYTES for piece in some)
    assert all((len(piece) + 1) * block_bytes > PIECE_BYTES for piece in some[:-1])


def test_room_is_bounded_and_tells_when_there_is_some_again() -> None:
    room, told = StagingBudget(3 * PIECE_BYTES), list[str]()
    held = [room.take(PIECE_BYTES, lambda: None) for _ in range(3)]
    assert all(piece is not None and piece.nbytes == PIECE_BYTES for piece in held)

    def first() -> None:
        told.append("first")

    assert room.take(1, first) is None
    assert room.take(1, first) is None
    assert room.take(1, lambda: told.append("second")) is None
    assert told == []
    assert held[0] is not None
    room.give_back(held[0])
    assert told == ["first", "second"], "everyone once"
    piece = room.take(10, first)
    assert piece is not None
    assert piece.nbytes == 10
    assert piece.obj is held[0].obj, "memory is used again"


def test_a_piece_larger_than_all_the_room_gets_it_alone() -> None:
    room = StagingBudget(2 * PIECE_BYTES)
    small = room.take(1, lambda: None)
    assert small is not None
    assert room.take(5 * PIECE_BYTES, lambda: None) is None
    room.give_back(small)
    large = room.take(5 * PIECE_BYTES, lambda: None)
    assert large is not None
    assert large.nbytes == 5 * PIECE_BYTES
    assert room.take(1, lambda: None) is None
    room.give_back(large)
    assert room.take(1, lambda: None) is not None
