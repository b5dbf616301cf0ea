"""Proof that KV blocks arrived as they were sent (rule 10)."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence

from baton.transport.base import PageMemory
from baton.transport.staging import pieces


async def checksum(memory: PageMemory, blocks: Sequence[int]) -> int:
    """Return the CRC-32 of the blocks' bytes, computed beside the event loop and without the GIL.

    The blocks must be pinned until it is done.
    """
    return await asyncio.to_thread(_crc32, memory, blocks)


def _crc32(memory: PageMemory, blocks: Sequence[int]) -> int:
    crc = 0
    copy = bytearray()
    form = memory.form_of(blocks)
    for some in pieces(blocks, form.nbytes, names=form.names):
        views = memory.in_place(some)
        if not views:
            size = form.size_of(some)
            copy = copy or bytearray(size)
            views = [memoryview(copy)[:size]]
            memory.gather(some, views[0])
        for view in views:
            crc = zlib.crc32(view, crc)
    return crc
