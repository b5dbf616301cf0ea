"""Bodies of ``/v1/responses``."""

from __future__ import annotations

import msgspec

from baton.request.limits import check_at_most
from baton.router.api.errors import invalid
from baton.router.api.http.openai.renaming import rename, renaming
from baton.router.api.http.preparing.chat import ChatPreparer
from baton.router.api.http.preparing.common import Chosen
from baton.router.api.http.responses.fields import ResponseRequest, raw_message
from baton.router.api.http.responses.input import chat_of
from baton.router.api.prepared import PreparedJob, Repeated, Telling
from baton.router.api.settings import ApiSettings
from baton.text.tokenizer import Tokenizer

MAX_METADATA, METADATA_KEY_CHARS, METADATA_CHARS = 16, 64, 512
"""Bounds on metadata, as in OpenAI's API: the events at an answer's beginning and end repeat it."""


class ResponsePreparer:
    """Reads the requests for one model."""

    def __init__(self, tokenizer: Tokenizer, settings: ApiSettings) -> None:
        self._chats = ChatPreparer(tokenizer, settings)
        self._limits = settings.conversation
        self._tokenizer = tokenizer

    def prepare(self, body: ResponseRequest, chosen: Chosen) -> PreparedJob:
        """Return the request in ``body``. Raises RequestError, by the names of the body's fields."""
        effort = None if body.reasoning is None else body.reasoning.effort
        template = {} if effort is None else self._chats.thinking.graded(effort, "reasoning.effort")
        _check_metadata(body.metadata or {})
        chat = chat_of(body, template, self._limits)
        with renaming(chat.names):
            job = self._chats.prepare(chat.body, chosen)
        rename(job, chat.names)
        job.telling = Telling(stream=bool(body.stream))
        if not self._chats.thinking.heeds(effort):
            job.ignored.append("reasoning.effort")
        job.repeated = _repeated(body, self._input_messages(body, job))
        return job

    def _input_messages(self, body: ResponseRequest, job: PreparedJob) -> bytes | None:
        if not body.enable_response_messages:
            return None
        prompt = job.prompts[0]
        return msgspec.json.encode([raw_message(self._tokenizer.decode(prompt, False), prompt)])


def _check_metadata(metadata: dict[str, str]) -> None:
    check_at_most("metadata", "entries", len(metadata), MAX_METADATA)
    for key, value in metadata.items():
        for what, text, most in (("key", key, METADATA_KEY_CHARS), ("value", value, METADATA_CHARS)):
            if len(text) > most:
                raise invalid(
                    "metadata",
                    f"metadata has a {what} of {len(text)} characters; at most {most} are allowed.",
                )


def _repeated(body: ResponseRequest, input_messages: bytes | None) -> Repeated:
    text = body.text
    plain = {"type": "text"}
    encode = msgspec.json.encode
    return Repeated(
        instructions=encode(body.instructions),
        metadata=encode(body.metadata or {}),
        tool_choice=encode("auto" if body.tool_choice is None else body.tool_choice),
        tools=encode(body.tools or []),
        format=encode(plain if text is None or text.format is None else text.format),
        max_output_tokens=body.max_output_tokens,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        top_logprobs=body.top_logprobs or 0,
        effort=None if body.reasoning is None else body.reasoning.effort,
        input_messages=input_messages,
    )
