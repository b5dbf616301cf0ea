"""A pool on a CUDA device as links see it: copies beside the steps, over when they say so, in few launches.

The device is a fake one, on which nothing runs before somebody waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.transport import device_copies
from baton.transport.base import DeviceView, GroupPart
from baton.transport.pool_memory import PoolMemory
from baton.transport.staging import DEVICE_PIECE_BYTES, DEVICE_STAGING_BYTES
from tests.support.fake_cuda.device import FakeCuda


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with FakeCuda() as fake:
        yield fake


def pool_of(cuda: FakeCuda, num_blocks: int = 16, *, block_size: int = 16, full: bool = True) -> Tensor:
    shape = (num_blocks, 2, 3, 2, block_size, 8)
    pool = (torch.randn(shape) if full else torch.zeros(shape)).cuda()
    torch.cuda.synchronize()
    return pool


def busy(cuda: FakeCuda) -> Callable[[], bool]:
    """A step that is under way on the stream that computes; returns whether it has run."""
    number = torch.zeros(1).cuda()
    torch.cuda.synchronize()
    number.add_(1)
    return lambda: bool(cuda.peek(number).item())


def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """The number of rows of each call of a torch function."""
    calls: list[int] = []
    plain = getattr(torch, name)

    def call(source: Tensor, dim: int, index: Tensor, **kwargs: Any) -> Tensor:
        calls.append(len(index))
        result: Tensor = plain(source, dim, index, **kwargs)
        return result

    monkeypatch.setattr(torch, name, call)
    return calls


class TestCopies:
    @pytest.mark.deep
    def test_bytes_go_over_without_waiting_for_the_step(self, cuda: FakeCuda) -> None:
        source, target = pool_of(cuda), pool_of(cuda, full=False)
        taken, given = PoolMemory(source), PoolMemory(target)
        step_ran = busy(cuda)
        piece = taken.staging().sending.take(3 * taken.part(16).form_of([0]).nbytes, lambda: None)
        assert piece is not None
        taken.part(16).gather([5, 6, 1], piece)
        given.part(16).scatter([3, 4, 9], piece)
        expected = torch.zeros(source.shape)
        expected[[3, 4, 9]] = cuda.peek(source)[[5, 6, 1]]
        assert torch.equal(cuda.peek(target), expected), "they are there on return, and nothing else"
        assert not step_ran()

    @pytest.mark.parametrize(("ours", "theirs"), [(16, 8), (8, 16)])
    def test_between_block_sizes(self, cuda: FakeCuda, ours: int, theirs: int) -> None:
        source = pool_of(cuda, 64 // ours, block_size=ours)
        target = pool_of(cuda, 64 // theirs, block_size=theirs, full=False)
        taken, given = (
            PoolMemory(pool).part(8, [GroupPart(range(1, 2), range(pool.shape[2]))])
            for pool in (source, target)
        )
        piece = memoryview(bytearray(8 * taken.form_of([0]).nbytes))
        taken.gather(range(8), piece)
        given.scatter(range(8), piece)
        here, there = (cuda.peek(pool).permute(1, 2, 3, 0, 4, 5).flatten(3, 4) for pool in (source, target))
        assert torch.equal(here[1], there[1])
        assert not there[0].any()

    def test_a_piece_through_the_devices_own_memory(self, cuda: FakeCuda) -> None:
        source, target = pool_of(cuda), pool_of(cuda, full=False)
        taken, given = PoolMemory(source), PoolMemory(target)
        room = taken.device_staging()
        assert room is not None
        step_ran = busy(cuda)
        size = 2 * taken.part(16).form_of([0]).nbytes
        view = room.sending.take(size, lambda: None)
        assert isinstance(view, DeviceView)
        assert (view.device, view.nbytes) == (0, size)
        taken.part(16).gather([5, 1], view)
        given.part(16).scatter([3, 9], view)
        assert torch.equal(cuda.peek(target)[[3, 9]], cuda.peek(source)[[5, 1]])
        assert not step_ran()
        room.sending.give_back(view)
        again = room.sending.take(1, lambda: None)
        assert isinstance(again, DeviceView)
        assert again.pointer == view.pointer, "memory is used again"

    def test_one_launch_for_many_blocks(self, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
        pool = pool_of(cuda, 512)
        part = PoolMemory(pool).part(16)
        calls = counted(monkeypatch, "index_select")
        piece = memoryview(bytearray(512 * part.form_of([0]).nbytes))
        part.gather(range(512), piece)
        assert len(calls) == 1

    def test_a_block_larger_than_a_lane_goes_in_several(
        self, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(device_copies, "_MAX_ROWS", 3)
        source, target = pool_of(cuda), pool_of(cuda, full=False)
        taken, given = (PoolMemory(pool).part(16) for pool in (source, target))
        calls = counted(monkeypatch, "index_select")
        piece = memoryview(bytearray(4 * taken.form_of([0]).nbytes))
        taken.gather([1, 2, 3, 9], piece)
        given.scatter([4, 5, 6, 7], piece)
        assert calls == [3, 3, 2], "two heads of each of four blocks"
        assert torch.equal(cuda.peek(target)[4:8], cuda.peek(source)[[1, 2, 3, 9]])

    def test_many_threads_at_once(self, cuda: FakeCuda) -> None:
        source, target = pool_of(cuda, 64), pool_of(cuda, 64, full=False)
        taken, given = PoolMemory(source), PoolMemory(target)
        failed: list[BaseException] = []

        def move(blocks: Sequence[int]) -> None:
            try:
                part = taken.part(16)
                piece = memoryview(bytearray(len(blocks) * part.form_of([0]).nbytes))
                for _ in range(3):
                    part.gather(blocks, piece)
                    given.part(16).scatter([63 - block for block in blocks], piece)
            except BaseException as error:  # noqa: BLE001 (told by the test's own thread)
                failed.append(error)

        threads = [threading.Thread(target=move, args=(range(n, 64, 8),)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed
        assert torch.equal(cuda.peek(target).flip(0), cuda.peek(source))


class TestRoom:
    def test_staging_is_pinned_and_allocated_at_the_start(self, cuda: FakeCuda) -> None:
        staging = PoolMemory(pool_of(cuda)).staging()
        allocated = len(cuda.pinned.sizes)
        for room in (staging.sending, staging.receiving):
            pieces = [room.take(DEVICE_PIECE_BYTES, lambda: None) for _ in range(8)]
            assert all(p is not None and torch.frombuffer(p, dtype=torch.uint8).is_pinned() for p in pieces)
            assert 8 * DEVICE_PIECE_BYTES == DEVICE_STAGING_BYTES
            assert room.take(1, lambda: None) is None
        assert len(cuda.pinned.sizes) == allocated

    def test_copies_take_a_bounded_part_of_the_device(self, cuda: FakeCuda) -> None:
        pool = pool_of(cuda)
        before = torch.cuda.memory_allocated()
        memory = PoolMemory(pool)
        first = torch.cuda.memory_allocated() - before
        assert first <= 40 << 20
        part = memory.part(16)
        piece = memoryview(bytearray(16 * part.form_of([0]).nbytes))
        for _ in range(4):
            part.gather(range(16), piece)
            memory.part(16).scatter(range(16), piece)
        assert torch.cuda.memory_allocated() - before == first


class TestSettling:
    def test_pages_are_settled_before_anything_touches_them(self, cuda: FakeCuda) -> None:
        asked: list[set[int]] = []
        memory = PoolMemory(pool_of(cuda), lambda pages: asked.append(set(pages)))
        piece = memoryview(bytearray(2 * memory.part(8).form_of([0]).nbytes))
        memory.part(16).on_device([5, 6])
        memory.part(8).scatter([3, 4], piece)
        memory.part(8).gather([6, 7], piece)
        assert asked == [{5, 6}, {1, 2}, {3}]


def test_a_thread_that_enters_has_the_pools_device_and_its_context(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeCuda(devices=2) as cuda:
        pool = torch.zeros(2, 1, 1, 2, 4, 4, device="cuda:1")
        memory = PoolMemory(pool)
        assert memory.device == 1
        seen: list[tuple[int, int]] = []
        synchronized: list[int] = []

        def see() -> None:
            before = torch.cuda.current_device()
            memory.enter()
            seen.append((before, torch.cuda.current_device()))

        plain = cuda.Stream.synchronize

        def synchronize(stream: Any) -> None:
            synchronized.append(stream.device_index)
            plain(stream)

        monkeypatch.setattr(cuda.Stream, "synchronize", synchronize)
        thread = threading.Thread(target=see)
        thread.start()
        thread.join()
        assert seen == [(0, 1)]
        assert synchronized == [1], "a call of the runtime on the device makes its context the thread's"
