"""What tests of connectors share: memory to move, and patience."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable, Sequence

from baton.transport.base import BlockForm, DeviceView

PAGE_BYTES = 4096
WAIT_S = 60.0


class HostMemory:
    """``PageMemory`` over plain bytes."""

    def __init__(self, num_pages: int, page_bytes: int = PAGE_BYTES, seed: int | None = None) -> None:
        self.block_bytes = page_bytes
        size = num_pages * page_bytes
        self._form = BlockForm(1, page_bytes)
        self.bytes = bytearray(size if seed is None else random.Random(seed).randbytes(size))

    def form_of(self, pages: Sequence[int]) -> BlockForm:
        return self._form

    def in_place(self, pages: Sequence[int]) -> list[memoryview]:
        """Adjacent pages as one run, as the pool does."""
        view, runs = memoryview(self.bytes), list[tuple[int, int]]()
        for page in pages:
            start = runs.pop()[0] if runs and runs[-1][1] == page else page
            runs.append((start, page + 1))
        return [view[start * self.block_bytes : end * self.block_bytes] for start, end in runs]

    def on_device(self, pages: Sequence[int]) -> list[DeviceView]:
        return []

    def whole(self) -> memoryview:
        return memoryview(self.bytes)

    def gather(self, pages: Sequence[int], into: memoryview | DeviceView) -> None:
        assert isinstance(into, memoryview)
        into[:] = b"".join(self.in_place(pages))

    def scatter(self, pages: Sequence[int], piece: memoryview | DeviceView) -> None:
        assert isinstance(piece, memoryview)
        for page in pages:
            self.in_place([page])[0][:], piece = piece[: self.block_bytes], piece[self.block_bytes :]

    def page(self, page: int) -> bytes:
        return bytes(self.in_place([page])[0])


def kv_threads(kind: str = "") -> list[threading.Thread]:
    """The threads that carry KV blocks, of links and connectors whose name begins with ``kind``. Other tests'
    may be among them: UCX has threads for the whole process."""
    return [thread for thread in threading.enumerate() if thread.name.startswith(f"kv-{kind}")]


async def within(awaitable: Awaitable[None]) -> None:
    await asyncio.wait_for(asyncio.ensure_future(awaitable), WAIT_S)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 (what it waits for has no event)
            await asyncio.sleep(0.005)
