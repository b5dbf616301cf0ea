"""The choices of a job: asked of the ring, turned into text, and merged into one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import count

from baton.core.sampling_params import ResolvedSampling
from baton.request.sampling import for_choice
from baton.router.api.audit import AuditRecord
from baton.router.api.job import Job
from baton.router.api.scope import RequestScope
from baton.router.dispatch.types import Request, Ring, RingError, TokenChunk
from baton.router.traces.record import RequestTrace
from baton.text.choice import ChoiceText, Delta
from baton.text.detokenizer import Detokenizer, NoText
from baton.text.stop import StopMatcher, StopStrings
from baton.text.tokenizer import Tokenizer

_QUEUED_PER_CHOICE = 2
"""The number of deltas per choice that may wait for a slow client, on top of what the ring itself buffers."""


Choice = AsyncGenerator[tuple[int, Delta]]


@dataclass(frozen=True, slots=True)
class _Ended:
    errors: list[Exception]
    """The error that ended the choice, if any. It is popped before it is raised: a list that kept it would
    be kept by its traceback."""


def answer(job: Job, scope: RequestScope, cache_salt: bytes, ring: Ring, tokenizer: Tokenizer) -> Choice:
    """Yield the deltas of all choices of ``job``, from ``ring``, until ``scope`` is left; see `merge`."""
    requests = _requests(job, cache_salt, scope.trace)
    scope.sends(requests)
    stops = StopStrings(job.params.stop) if job.params.stop else None
    choices: list[Choice] = []
    for first in range(0, job.choices, job.n):
        alike = requests[first : first + job.n]
        answers = scope.stack.enter_context(ring.generate(job.prompts[first // job.n], alike, job.priority))
        choices += [
            complete(index, chunks, _text(job, first // job.n, request.params, stops, tokenizer), job.record)
            for index, request, chunks in zip(count(first), alike, answers, strict=False)
        ]
    return merge(choices)


def _requests(job: Job, cache_salt: bytes, trace: RequestTrace) -> list[Request]:
    """Return a request to workers for each choice of ``job``. ``trace`` records the attempts."""
    return [
        Request(
            f"{job.request_id}-{index}",
            # A given seed means the same for each of several prompts; a drawn seed must not make prompts
            # alike.
            for_choice(job.params, index % job.n if job.seeded else index),
            cache_salt,
            trace=trace.answers[index],
        )
        for index in range(job.choices)
    ]


def _text(
    job: Job, prompt: int, params: ResolvedSampling, stops: StopStrings | None, tokenizer: Tokenizer
) -> ChoiceText:
    detokenizer: Detokenizer | NoText = NoText()
    if params.detokenize:
        detokenizer = tokenizer.detokenizer(
            skip_special_tokens=job.skip_special_tokens,
            kept=job.format.marker_ids if job.format else frozenset(),
            after=job.prompts[prompt],
        )
    return ChoiceText(
        params,
        detokenizer,
        StopMatcher(stops, included=params.include_stop_str_in_output) if stops else None,
        echo=job.echoes[prompt].text if job.echoes else "",
        only_echo=job.only_echo,
    )


def merge(choices: Sequence[Choice]) -> Choice:
    """Run ``choices``, whose deltas come with their choice's index, concurrently.

    The first choice to fail ends all of them with its error. Closing the generator closes all choices, and
    does not return before they are closed.
    """
    return choices[0] if len(choices) == 1 else _merged(choices)


async def _merged(choices: Sequence[Choice]) -> Choice:
    queue: asyncio.Queue[tuple[int, Delta] | _Ended] = asyncio.Queue(_QUEUED_PER_CHOICE * len(choices))
    tasks = [asyncio.create_task(_pump(choice, queue)) for choice in choices]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if not isinstance(item, _Ended):
                yield item
            elif item.errors:
                raise item.errors.pop()
            else:
                running -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(choice: Choice, queue: asyncio.Queue[tuple[int, Delta] | _Ended]) -> None:
    errors: list[Exception] = []
    try:
        async with aclosing(choice) as deltas:
            async for delta in deltas:
                await queue.put(delta)
    except Exception as caught:  # noqa: BLE001 - raised again by `merge`, in its consumer
        errors.append(caught)
    await queue.put(_Ended(errors))


async def complete(
    index: int, chunks: AsyncGenerator[TokenChunk], text: ChoiceText, record: AuditRecord | None = None
) -> AsyncGenerator[tuple[int, Delta]]:
    """Run one choice to its end; each delta comes with the choice's ``index``. Closing the generator cancels
    the choice on the workers. ``record`` notes which attempts brought tokens.

    Raises RingError if the ring does, or if the ring's stream ends without a finish reason.
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
    # The last delta comes after the ring's request is closed: a worker must not go on while a slow client
    # reads.
    yield index, delta
