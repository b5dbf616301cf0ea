"""Answering a job over HTTP: as one document or as a stream of events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial

import orjson
from starlette.requests import Request
from starlette.responses import Response

from baton.router.api.admission import Ticket
from baton.router.api.errors import as_api_error
from baton.router.api.http.chunks import (
    DONE,
    ChunkWriter,
    Envelope,
    error_event,
    usage_fields,
)
from baton.router.api.http.disconnect import ClientWatch
from baton.router.api.http.headers import told_headers
from baton.router.api.http.logprobs import NOTHING, Fields, LogprobsView, Told
from baton.router.api.http.parts import ChoiceParts
from baton.router.api.http.stream import Begun, EventStream, begin
from baton.router.api.prepared import Telling
from baton.router.api.service import CompletionService, Job, Usage
from baton.text.choice import Delta


@dataclass(slots=True)
class _Choice:
    """One choice of an answer that is given whole."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: Fields = field(default_factory=dict)
    prompt_logprobs: list[object] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    parts: ChoiceParts | None = None
    """Of a chat whose text is parsed."""

    def add(self, delta: Delta, told: Told) -> None:
        for name, values in (told.logprobs or {}).items():
            self.logprobs.setdefault(name, []).extend(values)
        self.prompt_logprobs = self.prompt_logprobs or told.prompt
        self.text.append(delta.text)
        self.token_ids += delta.token_ids
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        if self.parts is not None:
            self.parts.add(delta)
            self.finish_reason = self.parts.finish_reason(delta)


class Answerer:
    """Answers jobs in the shape of OpenAI's completions, or of its chat completions."""

    def __init__(self, service: CompletionService, *, chat: bool) -> None:
        self._service = service
        self._chat = chat

    async def answer(self, request: Request, job: Job, telling: Telling) -> Response:
        """The response to ``job``. Raises ApiError or RingError as long as nothing has been sent."""
        if telling.stream:
            return await self._streamed(request, job, telling)
        ticket = self._service.ticket(job)
        async with ClientWatch(request.receive):
            body = await self._document(job, ticket, telling.token_ids)
        return Response(body, media_type="application/json", headers=told_headers(ticket))

    def _envelope(self, job: Job, *, streamed: bool) -> Envelope:
        kind = "chat.completion" if self._chat else "text_completion"
        return Envelope(
            id=job.request_id,
            object=f"{kind}.chunk" if self._chat and streamed else kind,
            created=int(time.time()),
            model=job.model.name,
            system_fingerprint=f"baton-{job.model.revision[:12]}",
        )

    async def _document(self, job: Job, ticket: Ticket, with_token_ids: bool) -> bytes:
        usage = Usage.of(job)
        choices = [_Choice(parts=parts) for parts in _parts(job)]
        view = LogprobsView(self._service.tokenizer, job, chat=self._chat)
        async with aclosing(self._service.run(job, ticket)) as deltas:
            async for index, delta in deltas:
                choices[index].add(delta, await view.of(index, delta))
                usage.add(job, index, delta)
        document: dict[str, object] = {
            **self._envelope(job, streamed=False).fields(),
            "choices": [
                self._choice(job, index, choice, with_token_ids) for index, choice in enumerate(choices)
            ],
            "usage": usage_fields(usage),
        }
        if self._chat and with_token_ids:
            document["prompt_token_ids"] = job.prompts[0]
        if self._chat and job.prompt_logprobs is not None:
            document["prompt_logprobs"] = choices[0].prompt_logprobs
        return orjson.dumps(document)

    def _choice(self, job: Job, index: int, choice: _Choice, with_token_ids: bool) -> dict[str, object]:
        text = "".join(choice.text)
        fields: dict[str, object] = {"index": index}
        if self._chat:
            plain: dict[str, object] = {"role": "assistant", "content": text, "refusal": None}
            fields["message"] = plain if choice.parts is None else choice.parts.message()
        else:
            fields["text"] = text
        fields |= {
            "logprobs": choice.logprobs or None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if with_token_ids:
            fields["token_ids"] = choice.token_ids
            if not self._chat:
                fields["prompt_token_ids"] = job.prompts[index // job.n]
        if not self._chat and job.prompt_logprobs is not None:
            fields["prompt_logprobs"] = choice.prompt_logprobs
        return fields

    async def _streamed(self, request: Request, job: Job, telling: Telling) -> Response:
        """Waits for the first tokens, so that a request that cannot run fails with a status of its own."""
        begun = await begin(self._service, request, job)
        return EventStream(
            self._events(job, telling, begun),
            begun.deltas,
            begun.headers,
            self._service.relay(len),
            partial(self._service.cut_off, job),
        )

    async def _events(self, job: Job, telling: Telling, begun: Begun) -> AsyncGenerator[bytes]:
        mode, with_token_ids = telling.usage, telling.token_ids
        writer = ChunkWriter(
            self._envelope(job, streamed=True),
            chat=self._chat,
            choices=job.choices,
            usage=mode,
            token_ids=with_token_ids,
        )
        usage = Usage.of(job)
        view = LogprobsView(self._service.tokenizer, job, chat=self._chat)
        opened = [False] * job.choices
        parts = _parts(job)

        def text_event(index: int, delta: Delta, told: Told) -> bytes:
            choice = parts[index]
            if choice is None:
                return writer.delta(index, delta, usage, told.logprobs)
            pieces = choice.add(delta)
            reason = choice.finish_reason(delta)
            return writer.message(index, pieces, delta, reason, usage, told.logprobs)

        def event(index: int, delta: Delta, told: Told) -> bytes:
            usage.add(job, index, delta)
            if opened[index]:
                return text_event(index, delta, told)
            opened[index] = True
            prompt: dict[str, object] = {}
            if with_token_ids:
                prompt["prompt_token_ids"] = job.prompts[index // job.n]
            if job.prompt_logprobs is not None:
                prompt["prompt_logprobs"] = told.prompt
            if self._chat:
                return writer.opening(index, prompt) + text_event(index, delta, told)
            return writer.delta(index, delta, usage, told.logprobs, prompt)

        try:
            yield event(*begun.first, await view.of(*begun.first))
            async for index, delta in begun.deltas:
                told = NOTHING if delta.details is None else await view.of(index, delta)
                data = event(index, delta, told)
                if data:
                    yield data
            if mode != "none":
                yield writer.usage(usage)
        except Exception as error:  # noqa: BLE001 - the status is sent: an event is all that is left
            yield error_event(as_api_error(error, job.request_id))
        yield DONE


def _parts(job: Job) -> list[ChoiceParts | None]:
    """For each choice; None where the text is told as it is."""
    return [None if job.format is None else ChoiceParts(job.format) for _ in range(job.choices)]
