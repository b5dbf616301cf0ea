"""Proof that KV blocks arrived as they were sent (rule 10)."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence

from baton.connector.transport import PageMemory


async def checksum(memory: PageMemory, blocks: Sequence[int]) -> int:
    """CRC-32 of the blocks' bytes, computed beside the event loop and without the GIL.

    The blocks must be pinned until it is done.
    """
    return await asyncio.to_thread(_crc32, memory, blocks)


def _crc32(memory: PageMemory, blocks: Sequence[int]) -> int:
    crc = 0
    for view in memory.source(blocks):
        crc = zlib.crc32(view, crc)
    return crc
