"""The bytes of a streamed answer. Fields that all chunks share are serialised once per request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from baton.router.api.errors import ApiError
from baton.router.api.http.openai.logprobs import Fields
from baton.router.api.job import Usage
from baton.router.api.prepared import UsageMode
from baton.text.choice import Delta

DONE = b"data: [DONE]\n\n"

_NO_TOKENS = Delta("", ())


@dataclass(frozen=True, slots=True)
class Envelope:
    """The fields that all chunks of one answer, or the whole answer, share."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str

    def fields(self) -> dict[str, str | int]:
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


def usage_fields(usage: Usage) -> dict[str, int | dict[str, int]]:
    """Return OpenAI's usage object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def error_event(error: ApiError) -> bytes:
    """Return the event by which an answer that has begun tells that it failed."""
    return b"data: " + error.body() + b"\n\n"


class ChunkWriter:
    """Writes the events of one streamed answer."""

    def __init__(
        self, envelope: Envelope, *, chat: bool, choices: int, usage: UsageMode, token_ids: bool
    ) -> None:
        self._chat = chat
        self._with_token_ids = token_ids
        self._usage_mode: UsageMode = usage
        self._text_only = not token_ids and usage != "continuous"
        self._start = b"data: " + orjson.dumps(envelope.fields())[:-1]
        before_text = b',"delta":{"content":' if chat else b',"text":'
        self._heads = [
            b'%b,"choices":[{"index":%d%b' % (self._start, index, before_text) for index in range(choices)
        ]
        self._after_text = b"}" if chat else b""
        self._no_usage = b',"usage":null' if usage != "none" else b""
        self._no_prompt: dict[str, object] = {} if chat else {"prompt_token_ids": None}
        self._tail = self._event([self._after_text], _NO_TOKENS, None, None, None, None)

    def opening(self, index: int, usage: Usage, prompt: dict[str, object]) -> bytes:
        """Return the first event of a chat's choice, with its role. It also has the fields in ``prompt``."""
        told = _more_fields({"prompt_token_ids": None, **prompt})
        return (
            b'%b%b,"choices":[{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,'
            b'"finish_reason":null}]%b}\n\n' % (self._start, told, index, self._usage(usage))
        )

    def delta(
        self,
        index: int,
        delta: Delta,
        usage: Usage,
        logprobs: Fields | None = None,
        prompt: dict[str, object] | None = None,
    ) -> bytes:
        """Return one delta's event; empty if there is nothing to tell yet. ``prompt`` are further fields of
        the event."""
        if self._text_only and delta.finish_reason is None and logprobs is None and not prompt:
            if not delta.text:
                return b""
            return b"".join((self._heads[index], orjson.dumps(delta.text), self._tail))
        text = [self._heads[index], orjson.dumps(delta.text), self._after_text]
        return self._event(text, delta, delta.finish_reason, usage, logprobs, prompt)

    def message(
        self,
        index: int,
        pieces: Sequence[dict[str, object]],
        delta: Delta,
        finish_reason: str | None,
        usage: Usage,
        logprobs: Fields | None = None,
    ) -> bytes:
        """Return the events of a chat's delta whose text was parsed, one for each of ``pieces``; the last one
        has the rest of the delta. A finish reason behind a call has an event of its own, as OpenAI's has,
        since its client relies on it. Empty if there is nothing to tell yet."""
        ended = delta.finish_reason is not None
        if self._text_only and not pieces and not ended and logprobs is None:
            return b""
        head = b'%b,"choices":[{"index":%d,"delta":' % (self._start, index)
        *earlier, last = pieces or ({},)
        events = [
            self._event([head, orjson.dumps(piece)], _NO_TOKENS, None, usage, None, None) for piece in earlier
        ]
        if ended and "tool_calls" in last:
            told = delta._replace(finish_reason=None)
            events.append(self._event([head, orjson.dumps(last)], told, None, usage, logprobs, None))
            delta, logprobs, last = delta._replace(token_ids=()), None, {}
        events.append(self._event([head, orjson.dumps(last)], delta, finish_reason, usage, logprobs, None))
        return b"".join(events)

    def _event(
        self,
        parts: list[bytes],
        delta: Delta,
        finish_reason: str | None,
        usage: Usage | None,
        logprobs: Fields | None,
        prompt: dict[str, object] | None,
    ) -> bytes:
        """Return an event that begins with ``parts``. It has the fields that vLLM's have, null ones too."""
        parts += (
            b',"logprobs":',
            orjson.dumps(logprobs),
            b',"finish_reason":',
            orjson.dumps(finish_reason),
        )
        if delta.finish_reason is not None or not self._chat:
            parts += (b',"stop_reason":', orjson.dumps(delta.stop_reason))
        parts.append(_more_fields(self._no_prompt | (prompt or {})))
        parts += (b',"token_ids":', orjson.dumps(delta.token_ids if self._with_token_ids else None))
        parts += (b"}]", self._usage(usage), b"}\n\n")
        return b"".join(parts)

    def _usage(self, usage: Usage | None) -> bytes:
        if usage is None or self._usage_mode != "continuous":
            return self._no_usage
        return b',"usage":' + orjson.dumps(usage_fields(usage))

    def usage(self, usage: Usage) -> bytes:
        """Return the event after the last choice's end, for a client that asked for usage."""
        return b'%b,"choices":[],"usage":%b}\n\n' % (self._start, orjson.dumps(usage_fields(usage)))


def _more_fields(fields: dict[str, object]) -> bytes:
    """Return ``fields`` as the rest of an object that has some fields already."""
    return b"," + orjson.dumps(fields)[1:-1] if fields else b""
