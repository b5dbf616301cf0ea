"""A message in Anthropic's shape: the object, and the events of its stream."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import orjson

from baton.router.api.errors import ApiError
from baton.router.api.http.openai.blocks import Closed, GrowingAnswer, Grown, Opened, OutputBlock, Step
from baton.router.api.http.server.anthropic_errors import error_fields
from baton.router.api.job import Job

Fields = dict[str, object]

_STOPS = {"length": "max_tokens", "tool_calls": "tool_use"}

_DELTAS = {
    "text": b'{"type":"text_delta","text":',
    "reasoning": b'{"type":"thinking_delta","thinking":',
    "call": b'{"type":"input_json_delta","partial_json":',
}


class MessageWriter:
    """Writes one message. Fields that all deltas of a block share are serialised once."""

    def __init__(self, job: Job) -> None:
        self.answer = GrowingAnswer(job)
        self._head = b""
        """The beginning of each delta event of the open block, up to the text."""

    def document(self) -> Fields:
        """Return the whole message, which has ended."""
        return {
            **self._message(),
            "content": [_content(block) for block in self.answer.whole()],
            **self._stop(),
            "usage": self._usage(),
        }

    def opening(self) -> bytes:
        message = {**self._message(), "content": [], "stop_reason": None, "stop_sequence": None}
        message["usage"] = {**self._usage(), "output_tokens": 0}
        return _event("message_start", message=message) + _event("ping")

    def events(self, steps: Sequence[Step]) -> bytes:
        told = bytearray()
        for step in steps:
            match step:
                case Grown(_, text):
                    told += self._head + orjson.dumps(text) + b"}}\n\n"
                case Opened(block):
                    told += self._opened(block)
                case Closed(block):
                    if block.kind == "reasoning":
                        signature = {"type": "signature_delta", "signature": ""}
                        told += _event("content_block_delta", index=block.index, delta=signature)
                    told += _event("content_block_stop", index=block.index)
        return bytes(told)

    def closing(self) -> bytes:
        return _event("message_delta", delta=self._stop(), usage=self._usage()) + _event("message_stop")

    def failure(self, error: ApiError) -> bytes:
        return _event("error", error=error_fields(error), request_id=self.answer.job.request_id)

    def _opened(self, block: OutputBlock) -> bytes:
        self._head = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":%b'
            % (block.index, _DELTAS[block.kind])
        )
        match block.kind:
            case "text":
                start: Fields = {"type": "text", "text": ""}
            case "reasoning":
                start = {"type": "thinking", "thinking": "", "signature": ""}
            case "call":
                start = {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}
        return _event("content_block_start", index=block.index, content_block=start)

    def _message(self) -> Fields:
        job = self.answer.job
        return {"id": job.request_id, "type": "message", "role": "assistant", "model": job.model.name}

    def _stop(self) -> Fields:
        reason, last = self.answer.finish_reason, self.answer.last
        matched = None if last is None or reason != "stop" else last.stop_reason
        if isinstance(matched, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": matched}
        return {"stop_reason": _STOPS.get(reason or "", "end_turn"), "stop_sequence": None}

    def _usage(self) -> Fields:
        """Return the usage. Anthropic counts cached tokens apart from the input."""
        usage = self.answer.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }


def _content(block: OutputBlock) -> Fields:
    match block.kind:
        case "text":
            return {"type": "text", "text": block.text}
        case "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": ""}
    # The parser has checked that the arguments are an object, or the call would be broken.
    return {
        "type": "tool_use",
        "id": block.call_id,
        "name": block.name,
        "input": msgspec.json.decode(block.text or "{}"),
    }


def _event(type_: str, **fields: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (type_.encode(), orjson.dumps({"type": type_, **fields}))
