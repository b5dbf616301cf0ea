"""One choice, from the ring to its end."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from baton.router.audit import Record
from baton.router.types import RingError, TokenChunk
from baton.text.choice import ChoiceText, Delta


async def complete(
    index: int, chunks: AsyncGenerator[TokenChunk], text: ChoiceText, record: Record | None = None
) -> AsyncGenerator[tuple[int, Delta]]:
    """Run one choice to its end; each delta comes with the choice's ``index``. Closing the generator cancels
    it on the workers. ``record`` hears which attempts brought tokens.

    Raises RingError when the ring does, or when it stops without saying why.
    """
    async with aclosing(chunks):
        async for chunk in chunks:
            if record is not None:
                record.attempted(chunk.attempt)
            delta = text.add(chunk)
            if delta.finish_reason is not None:
                break
            yield index, delta
        else:
            raise RingError(502, "incomplete_answer", "The workers ended the answer before it was complete.")
    # Only now, with the ring's request closed: a worker must not go on while a slow client reads the end.
    yield index, delta
