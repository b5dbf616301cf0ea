"""Answering a job of one choice in another protocol's shape: as one document or as a stream of events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Protocol

import orjson
from starlette.requests import Request
from starlette.responses import Response

from baton.router.api.errors import ApiError, as_api_error
from baton.router.api.http.blocks import GrowingAnswer, Step
from baton.router.api.http.disconnect import ClientWatch
from baton.router.api.http.headers import told_headers
from baton.router.api.http.logprobs import LogprobsView
from baton.router.api.http.stream import Begun, EventStream, begin
from baton.router.api.service import CompletionService, Job
from baton.text.choice import Delta


class AnswerWriter(Protocol):
    """Writes one answer in the shape of a protocol."""

    answer: GrowingAnswer

    def document(self) -> dict[str, object]:
        """The answer that is over, whole."""

    def opening(self) -> bytes:
        """The events before the first delta."""

    def events(self, steps: Sequence[Step]) -> bytes:
        """Those of one delta; empty when there is nothing to tell yet."""

    def closing(self) -> bytes:
        """Those after the last delta."""

    def failure(self, error: ApiError) -> bytes:
        """Those of an answer that fails on its way."""


async def answer_single(
    service: CompletionService, request: Request, job: Job, writer: AnswerWriter, *, stream: bool
) -> Response:
    """The response to ``job``. Raises ApiError or RingError as long as nothing has been sent."""
    view = LogprobsView(service.tokenizer, job, chat=True)
    if stream:
        begun = await begin(service, request, job)
        return EventStream(
            _events(job, begun, view, writer),
            begun.deltas,
            begun.headers,
            service.relay(len),
            partial(service.cut_off, job),
        )
    ticket = service.ticket(job)
    async with ClientWatch(request.receive), aclosing(service.run(job, ticket)) as deltas:
        async for index, delta in deltas:
            writer.answer.add(delta, await _logprobs(view, index, delta))
    return Response(
        orjson.dumps(writer.document()), media_type="application/json", headers=told_headers(ticket)
    )


async def _logprobs(view: LogprobsView, index: int, delta: Delta) -> Sequence[object]:
    """What a chat tells of each token, if that is asked for."""
    if delta.details is None:
        return ()
    told = (await view.of(index, delta)).logprobs
    return () if told is None else told["content"]


async def _events(job: Job, begun: Begun, view: LogprobsView, writer: AnswerWriter) -> AsyncGenerator[bytes]:
    answer = writer.answer
    try:
        index, delta = begun.first
        # What the prompt had cached is known with the first delta.
        steps = answer.add(delta, await _logprobs(view, index, delta))
        yield writer.opening() + writer.events(steps)
        async for index, delta in begun.deltas:
            data = writer.events(answer.add(delta, await _logprobs(view, index, delta)))
            if data:
                yield data
        yield writer.closing()
    except Exception as error:  # noqa: BLE001 - the status is sent: an event is all that is left
        yield writer.failure(as_api_error(error, job.request_id))
