"""A response in OpenAI's shape: the object, and the events of its stream."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import orjson

from baton.router.api.errors import ApiError
from baton.router.api.http.openai.blocks import Closed, GrowingAnswer, Grown, Opened, OutputBlock, Step
from baton.router.api.http.responses.fields import raw_message
from baton.router.api.job import Job
from baton.router.api.prepared import Repeated

Fields = dict[str, object]

_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}
_DELTAS = {
    "reasoning": "response.reasoning_text.delta",
    "text": "response.output_text.delta",
    "call": "response.function_call_arguments.delta",
}


class ResponseWriter:
    """Writes one response. Fields that all deltas of a block share are serialised once."""

    def __init__(self, job: Job, repeated: Repeated) -> None:
        self._input_messages = repeated.input_messages
        self.answer = GrowingAnswer(job, keeps_raw=self._input_messages is not None)
        self._common = _common(job, repeated)
        self._number = itertools.count()
        self._head = b""
        """The beginning of each delta event of the open block, up to its sequence number."""

    def document(self) -> Fields:
        """Return the whole response, which has ended."""
        return self._response(self.answer.whole())

    def opening(self) -> bytes:
        response = self._response([])
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def events(self, steps: Sequence[Step]) -> bytes:
        told = bytearray()
        for step in steps:
            match step:
                case Grown():
                    told += self._delta(step)
                case Opened(block):
                    told += self._opened(block)
                case Closed(block):
                    told += self._closed(block)
        return bytes(told)

    def closing(self) -> bytes:
        response = self._response(self.answer.blocks)
        return self._event(f"response.{response['status']}", response=response)

    def failure(self, error: ApiError) -> bytes:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        response = {
            **self._response(self.answer.blocks),
            "status": "failed",
            "error": {"code": code, "message": error.message},
        }
        return self._event("response.failed", response=response)

    def _response(self, blocks: Sequence[OutputBlock]) -> Fields:
        answer = self.answer
        complete = answer.finish_reason in ("stop", "tool_calls")
        over = answer.finish_reason is not None
        status = "completed" if complete else "incomplete" if over else "in_progress"
        return {
            **self._common,
            "status": status,
            "completed_at": int(time.time()) if complete else None,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [
                self._item(block, "completed" if complete or block is not blocks[-1] else "incomplete")
                for block in blocks
            ],
            "usage": self._usage() if over else None,
            **(self._raw_messages() if over else {}),
        }

    def _raw_messages(self) -> Fields:
        """Return prompt and answer before they are parsed, in vLLM's shape, if the request asks for them."""
        if self._input_messages is None:
            return {}
        answer = self.answer
        return {
            "input_messages": orjson.Fragment(self._input_messages),
            "output_messages": [raw_message("".join(answer.raw_text), answer.raw_ids)],
        }

    def _usage(self) -> Fields:
        usage = self.answer.usage
        return {
            "input_tokens": usage.prompt_tokens,
            # What writing to a cache costs elsewhere: here, nothing is counted as written.
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self.answer.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    def _item(self, block: OutputBlock, status: str) -> Fields:
        item: Fields = {
            "id": self._item_id(block),
            "status": status if block.broken is None else "incomplete",
        }
        match block.kind:
            case "text":
                return {**item, "type": "message", "role": "assistant", "content": [_part(block)]}
            case "reasoning":
                return {**item, "type": "reasoning", "summary": [], "content": [_part(block)]}
        return {
            **item,
            "type": "function_call",
            "call_id": block.call_id,
            "name": block.name,
            "arguments": block.text,
        }

    def _item_id(self, block: OutputBlock) -> str:
        minted = self.answer.job.request_id.partition("_")[2]
        return f"{_PREFIXES[block.kind]}_{minted}{block.index:02d}"

    def _opened(self, block: OutputBlock) -> bytes:
        of: Fields = {"item_id": self._item_id(block), "output_index": block.index}
        if block.kind != "call":
            of["content_index"] = 0
        kind = _DELTAS[block.kind]
        fields = orjson.dumps({"type": kind, **of})[:-1]
        self._head = b"event: %b\ndata: %b" % (kind.encode(), fields)
        item = self._item(block, "in_progress")
        if block.kind == "call":
            return self._event("response.output_item.added", output_index=block.index, item=item)
        item["content"] = []
        return self._event("response.output_item.added", output_index=block.index, item=item) + self._event(
            "response.content_part.added", **of, part=_part(block)
        )

    def _delta(self, step: Grown) -> bytes:
        logprobs = b',"logprobs":' + orjson.dumps(step.logprobs) if step.block.kind == "text" else b""
        return b'%b,"sequence_number":%d,"delta":%b%b}\n\n' % (
            self._head,
            next(self._number),
            orjson.dumps(step.text),
            logprobs,
        )

    def _closed(self, block: OutputBlock) -> bytes:
        of: Fields = {"item_id": self._item_id(block), "output_index": block.index}
        if block.kind == "call":
            told = self._event(
                "response.function_call_arguments.done", **of, name=block.name, arguments=block.text
            )
        else:
            of["content_index"] = 0
            told = self._text_done(block, of)
            told += self._event("response.content_part.done", **of, part=_part(block))
        cut = self.answer.finish_reason == "length" and block is self.answer.blocks[-1]
        item = self._item(block, "incomplete" if cut else "completed")
        return told + self._event("response.output_item.done", output_index=block.index, item=item)

    def _text_done(self, block: OutputBlock, of: Fields) -> bytes:
        if block.kind == "reasoning":
            return self._event("response.reasoning_text.done", **of, text=block.text)
        return self._event("response.output_text.done", **of, text=block.text, logprobs=block.logprobs)

    def _event(self, type_: str, **fields: object) -> bytes:
        data = orjson.dumps({"type": type_, "sequence_number": next(self._number), **fields})
        return b"event: %b\ndata: %b\n\n" % (type_.encode(), data)


def _part(block: OutputBlock) -> Fields:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": block.logprobs}


def _common(job: Job, repeated: Repeated) -> Fields:
    """Return what the response repeats of its request; the same in all its events."""
    return {
        "id": job.told_id,
        "object": "response",
        "created_at": int(time.time()),
        "model": job.model.name,
        "instructions": orjson.Fragment(repeated.instructions),
        "metadata": orjson.Fragment(repeated.metadata),
        "max_output_tokens": repeated.max_output_tokens,
        "max_tool_calls": None,
        "parallel_tool_calls": repeated.parallel_tool_calls,
        "previous_response_id": None,
        "background": False,
        "store": False,
        "service_tier": "default",
        "temperature": job.params.temperature,
        "top_p": job.params.top_p,
        "top_logprobs": repeated.top_logprobs,
        "tool_choice": orjson.Fragment(repeated.tool_choice),
        "tools": orjson.Fragment(repeated.tools),
        "text": {"format": orjson.Fragment(repeated.format)},
        "reasoning": {"effort": repeated.effort, "summary": None},
        "truncation": "disabled",
    }
