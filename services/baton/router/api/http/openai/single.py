"""The answer to a job of one choice in another protocol's shape: as one document or as a stream of events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Protocol

import orjson
from starlette.requests import Request
from starlette.responses import Response

from baton.router.api.errors import ApiError, as_api_error
from baton.router.api.http.openai.blocks import GrowingAnswer, Step
from baton.router.api.http.openai.logprobs import LogprobsView
from baton.router.api.http.server.disconnect import ClientWatch
from baton.router.api.http.server.headers import answer_headers
from baton.router.api.http.server.jobs import ReadJob
from baton.router.api.http.server.stream import Begun, begin
from baton.router.api.job import Job
from baton.text.choice import Delta


class AnswerWriter(Protocol):
    """Writes one answer in the shape of a protocol."""

    answer: GrowingAnswer

    def document(self) -> dict[str, object]:
        """Return the whole answer, which has ended."""

    def opening(self) -> bytes:
        """Return the events before the first delta."""

    def events(self, steps: Sequence[Step]) -> bytes:
        """Return the events of one delta; empty if there is nothing to tell yet."""

    def closing(self) -> bytes:
        """Return the events after the last delta."""

    def failure(self, error: ApiError) -> bytes:
        """Return the events of an answer that fails after it has begun."""


async def answer_single(request: Request, asked: ReadJob, writer: AnswerWriter) -> Response:
    """Return the response to ``asked``. Raises ApiError or RingError as long as nothing has been sent."""
    service, job, prepared = asked
    view = LogprobsView(service.tokenizer, job, chat=True)
    if prepared.telling.stream:
        begun = await begin(service, request, job)
        return begun.stream(_events(job, begun, view, writer))
    scope = service.scope(job)
    async with ClientWatch(request.receive), aclosing(service.run(job, scope)) as deltas:
        async for index, delta in deltas:
            writer.answer.add(delta, await _logprobs(view, index, delta))
    return Response(
        orjson.dumps(writer.document()), media_type="application/json", headers=answer_headers(scope)
    )


async def _logprobs(view: LogprobsView, index: int, delta: Delta) -> Sequence[object]:
    """Return what a chat tells of each token, if the request asks for it."""
    if delta.details is None:
        return ()
    told = (await view.of(index, delta)).logprobs
    return () if told is None else told["content"]


async def _events(job: Job, begun: Begun, view: LogprobsView, writer: AnswerWriter) -> AsyncGenerator[bytes]:
    answer = writer.answer
    try:
        index, delta = begun.first
        # The first delta says how much of the prompt was cached.
        steps = answer.add(delta, await _logprobs(view, index, delta))
        yield writer.opening() + writer.events(steps)
        async for index, delta in begun.deltas:
            data = writer.events(answer.add(delta, await _logprobs(view, index, delta)))
            if data:
                yield data
        yield writer.closing()
    except Exception as error:  # noqa: BLE001 - the status is sent: only an event can tell
        yield writer.failure(as_api_error(error, job.request_id))
