"""The waiting room: in order, each place once, and nobody for longer than they would."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from baton.router.dispatch.waiting_room import REFUSALS, FullError, WaitingRoom


class Places:
    """So many places, and who got them."""

    def __init__(self, free: int = 0) -> None:
        self.free = free
        self.taken: list[str] = []

    def take(self, name: str) -> Callable[[], bool]:
        def take() -> bool:
            if not self.free:
                return False
            self.free -= 1
            self.taken.append(name)
            return True

        return take


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_who_finds_a_place_does_not_wait() -> None:
    places, room = Places(1), WaitingRoom(0)
    await room.wait(places.take("a"), soon())
    assert places.taken == ["a"] and len(room) == 0


async def test_places_go_by_turn_and_then_by_arrival() -> None:
    places, room = Places(), WaitingRoom(10)
    names = [("late", (1.0,)), ("a", (0.0,)), ("b", (0.0,)), ("first", (-1.0,))]
    waiting = [asyncio.create_task(room.wait(places.take(name), soon(), turn)) for name, turn in names]
    await settle()
    assert len(room) == 4
    places.free = 3
    room.changed()
    assert places.taken == ["first", "a", "b"] and len(room) == 1
    places.free = 1
    room.changed()
    await asyncio.gather(*waiting)
    assert places.taken[-1] == "late" and len(room) == 0


async def test_nobody_overtakes_those_who_wait() -> None:
    places, room = Places(), WaitingRoom(10)
    first = asyncio.create_task(room.wait(places.take("first"), soon()))
    await settle()
    places.free = 1  # and nobody has said so yet
    second = asyncio.create_task(room.wait(places.take("second"), soon()))
    await settle()
    assert places.taken == ["first"]
    second.cancel()
    await first


async def test_waiting_ends_and_leaves_nothing() -> None:
    places, room = Places(), WaitingRoom(10)
    with pytest.raises(TimeoutError):
        await room.wait(places.take("a"), time.monotonic() + 0.02)
    with pytest.raises(TimeoutError):
        await room.wait(places.take("b"), time.monotonic() - 1)
    left = asyncio.create_task(room.wait(places.take("c"), soon()))
    await settle()
    left.cancel()
    await asyncio.wait([left])
    assert len(room) == 0
    places.free = 3
    room.changed()
    assert places.taken == []


async def test_a_full_room_takes_nobody() -> None:
    places, room = Places(), WaitingRoom(1)
    first = asyncio.create_task(room.wait(places.take("a"), soon()))
    await settle()
    with pytest.raises(FullError):
        await room.wait(places.take("b"), soon())
    places.free = 1
    room.changed()
    await first


async def test_what_beginning_raises_is_raised_to_who_waits() -> None:
    room = WaitingRoom(2)
    ready = False

    def take() -> bool:
        if ready:
            raise ValueError("on purpose")
        return False

    waiting = asyncio.create_task(room.wait(take, soon()))
    await settle()
    ready = True
    room.changed()
    with pytest.raises(ValueError, match="on purpose"):
        await waiting
    assert len(room) == 0


async def test_a_round_costs_few_placements() -> None:
    room, asked = WaitingRoom(1000), 0

    def take() -> bool:
        nonlocal asked
        asked += 1
        return False

    waiting = [asyncio.create_task(room.wait(take, soon())) for _ in range(100)]
    await settle()
    asked = 0
    room.changed()
    assert asked == REFUSALS
    for each in waiting:
        each.cancel()
    await asyncio.wait(waiting)
