"""When the router looks for cycles."""

from __future__ import annotations

import asyncio
import gc
import mmap
from collections.abc import Iterator

import pytest

from baton.router.processes import gc as garbage


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


@pytest.fixture
def collections(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Full collections; the first is that of the start."""
    done: list[int] = []
    monkeypatch.setattr(garbage, "LOOK_S", 0.01)
    monkeypatch.setattr(gc, "collect", lambda: done.append(1))
    return done


async def looked_for(seconds: float, *, idle: bool, memory: list[int]) -> None:
    def used() -> int:
        return memory.pop(0) if len(memory) > 1 else memory[0]

    looking = asyncio.create_task(garbage.collect(lambda: idle, used))
    await asyncio.sleep(seconds)
    looking.cancel()


async def test_streams_are_not_held_up_for_what_has_not_grown(
    collections: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(garbage, "BUSY_S", 0.0)
    monkeypatch.setattr(garbage, "IDLE_S", 0.0)
    await looked_for(0.2, idle=False, memory=[0, garbage.GROWN_BYTES - 1])
    assert len(collections) == 1


async def test_memory_that_has_grown_is_looked_at(
    collections: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(garbage, "BUSY_S", 0.0)
    grown = garbage.GROWN_BYTES
    await looked_for(0.3, idle=False, memory=[0, grown, grown])
    assert len(collections) == 2, "once: it is compared with what is left"


async def test_all_is_looked_at_when_nobody_waits(
    collections: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(garbage, "IDLE_S", 0.0)
    await looked_for(0.3, idle=True, memory=[0])
    assert len(collections) > 2


def test_the_memory_of_a_process() -> None:
    before = garbage.resident_bytes()
    with mmap.mmap(-1, 64 << 20) as held:  # an allocator may have as much left over from other tests
        held[::4096] = b"x" * len(held[::4096])
        assert garbage.resident_bytes() - before > 48 << 20
