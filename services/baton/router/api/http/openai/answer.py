"""The answer to a job over HTTP: as one document or as a stream of events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from types import MappingProxyType

import orjson
from starlette.requests import Request
from starlette.responses import Response

from baton.router.api.errors import as_api_error
from baton.router.api.http.openai.chunks import (
    DONE,
    ChunkWriter,
    Envelope,
    error_event,
    usage_fields,
)
from baton.router.api.http.openai.logprobs import NOTHING, DeltaLogprobs, Fields, LogprobsView
from baton.router.api.http.openai.parts import ChoiceParts
from baton.router.api.http.server.disconnect import ClientWatch
from baton.router.api.http.server.headers import answer_headers
from baton.router.api.http.server.jobs import ReadJob
from baton.router.api.http.server.stream import Begun, Deltas, begin
from baton.router.api.job import Job, Usage
from baton.router.api.prepared import Telling
from baton.text.choice import Delta

_NEVER: Mapping[str, object] = MappingProxyType(
    {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}
)
"""Fields of vLLM's that an answer always has there, and that Baton has nothing for."""


@dataclass(slots=True)
class _Choice:
    """One choice of an answer that is sent as a whole."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: Fields = field(default_factory=dict)
    prompt_logprobs: list[object] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    parts: ChoiceParts | None = None
    """The parts of a chat's message; None where its text is not parsed."""

    def add(self, delta: Delta, told: DeltaLogprobs) -> None:
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


async def answer_choices(request: Request, asked: ReadJob, *, chat: bool) -> Response:
    """Return the response to ``asked``, in the shape of OpenAI's completions, or of its chat completions.
    Raises ApiError or RingError as long as nothing has been sent."""
    service, job, prepared = asked
    view = LogprobsView(service.tokenizer, job, chat=chat)
    if prepared.telling.stream:
        # The first tokens are awaited, so that a request that cannot run fails with a status of its own.
        begun = await begin(service, request, job)
        return begun.stream(_events(begun, view, prepared.telling, chat=chat))
    scope = service.scope(job)
    async with ClientWatch(request.receive):
        choices, usage = await _collected(service.run(job, scope), job, view)
    document = _document(job, choices, usage, chat=chat, with_token_ids=prepared.telling.token_ids)
    return Response(orjson.dumps(document), media_type="application/json", headers=answer_headers(scope))


def _envelope(job: Job, *, chat: bool, streamed: bool) -> Envelope:
    kind = "chat.completion" if chat else "text_completion"
    return Envelope(
        id=job.told_id,
        object=f"{kind}.chunk" if chat and streamed else kind,
        created=int(time.time()),
        model=job.model.name,
        system_fingerprint=f"baton-{job.model.revision[:12]}",
    )


async def _collected(deltas: Deltas, job: Job, view: LogprobsView) -> tuple[list[_Choice], Usage]:
    usage = Usage.of(job)
    choices = [_Choice(parts=parts) for parts in _parts(job)]
    async with aclosing(deltas):
        async for index, delta in deltas:
            choices[index].add(delta, await view.of(index, delta))
            usage.add(job, index, delta)
    return choices, usage


def _document(
    job: Job, choices: Sequence[_Choice], usage: Usage, *, chat: bool, with_token_ids: bool
) -> dict[str, object]:
    document: dict[str, object] = {
        **_envelope(job, chat=chat, streamed=False).fields(),
        "service_tier": None,
        "choices": [
            _choice_fields(job, index, choice, chat=chat, with_token_ids=with_token_ids)
            for index, choice in enumerate(choices)
        ],
        "usage": usage_fields(usage),
    }
    if chat:
        document["prompt_logprobs"] = choices[0].prompt_logprobs
        document["prompt_token_ids"] = job.prompts[0] if with_token_ids else None
        document["prompt_text"] = None
    return {**document, **_NEVER}


def _choice_fields(
    job: Job, index: int, choice: _Choice, *, chat: bool, with_token_ids: bool
) -> dict[str, object]:
    text = "".join(choice.text)
    fields: dict[str, object] = {"index": index}
    if chat:
        plain: dict[str, object] = {"role": "assistant", "content": text, "refusal": None}
        fields["message"] = plain if choice.parts is None else choice.parts.message()
    else:
        fields["text"] = text
    fields |= {
        "logprobs": choice.logprobs or None,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "token_ids": choice.token_ids if with_token_ids else None,
        "routed_experts": None,
    }
    if not chat:
        fields["prompt_logprobs"] = choice.prompt_logprobs
        fields["prompt_token_ids"] = job.prompts[index // job.n] if with_token_ids else None
    return fields


async def _events(begun: Begun, view: LogprobsView, telling: Telling, *, chat: bool) -> AsyncGenerator[bytes]:
    job, mode, with_token_ids = begun.job, telling.usage, telling.token_ids
    writer = ChunkWriter(
        _envelope(job, chat=chat, streamed=True),
        chat=chat,
        choices=job.choices,
        usage=mode,
        token_ids=with_token_ids,
    )
    usage = Usage.of(job)
    opened = [False] * job.choices
    parts = _parts(job)

    def text_event(index: int, delta: Delta, told: DeltaLogprobs) -> bytes:
        choice = parts[index]
        if choice is None:
            return writer.delta(index, delta, usage, told.logprobs)
        pieces = choice.add(delta)
        reason = choice.finish_reason(delta)
        return writer.message(index, pieces, delta, reason, usage, told.logprobs)

    def event(index: int, delta: Delta, told: DeltaLogprobs) -> bytes:
        usage.add(job, index, delta)
        if opened[index]:
            return text_event(index, delta, told)
        opened[index] = True
        prompt: dict[str, object] = {}
        if with_token_ids:
            prompt["prompt_token_ids"] = job.prompts[index // job.n]
        if job.prompt_logprobs is not None:
            prompt["prompt_logprobs"] = told.prompt
        if chat:
            return writer.opening(index, usage.before(delta), prompt) + text_event(index, delta, told)
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
    except Exception as error:  # noqa: BLE001 - the status is sent: only an event can tell
        yield error_event(as_api_error(error, job.request_id))
    yield DONE


def _parts(job: Job) -> list[ChoiceParts | None]:
    """Return the parts of each choice; None where the text is not parsed."""
    return [None if job.format is None else ChoiceParts(job.format) for _ in range(job.choices)]
