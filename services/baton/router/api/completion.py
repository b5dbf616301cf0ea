"""One choice, from the ring to its end."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from baton.router.types import Ring, RingError
from baton.sampling_params import SamplingParams
from baton.text.choice import ChoiceText, Delta


async def complete(
    ring: Ring, request_id: str, prompt_ids: list[int], params: SamplingParams, text: ChoiceText
) -> AsyncGenerator[Delta]:
    """Run one choice to its end. Closing the generator cancels it on the workers.

    Raises RingError when the ring does, or when it stops without saying why.
    """
    async with aclosing(ring.generate(request_id, prompt_ids, params)) as chunks:
        async for chunk in chunks:
            delta = text.add(chunk)
            if delta.finish_reason is not None:
                break
            yield delta
        else:
            raise RingError(502, "incomplete_answer", "The workers ended the answer before it was complete.")
    # Only now, with the ring's request closed: a worker must not go on while a slow client reads the end.
    yield delta
