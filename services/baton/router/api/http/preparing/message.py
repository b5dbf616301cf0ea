"""Bodies of ``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

import orjson

from baton.router.api.errors import invalid, shown
from baton.router.api.http.anthropic.fields import CountRequest, MessageRequest, ThinkingOptions
from baton.router.api.http.anthropic.input import chat_of
from baton.router.api.http.openai.renaming import rename, renaming
from baton.router.api.http.preparing.chat import ChatPreparer
from baton.router.api.http.preparing.common import Chosen
from baton.router.api.prepared import Document, PreparedJob, Telling
from baton.router.api.settings import ApiSettings
from baton.text.config import Json
from baton.text.tokenizer import Tokenizer

MIN_BUDGET = 1024
TOOL_NAME_CHARS = 128
"""The most characters of a tool's name. Tools of MCP servers have long names."""


class MessagePreparer:
    """Reads the conversations for one model."""

    def __init__(self, tokenizer: Tokenizer, settings: ApiSettings) -> None:
        self._chats = ChatPreparer(tokenizer, settings, TOOL_NAME_CHARS)
        self._limits = settings.conversation

    def prepare(self, body: MessageRequest, chosen: Chosen) -> PreparedJob:
        """Return the request in ``body``. Raises RequestError, by the names of the body's fields."""
        chat = chat_of(body, self._template(body), self._limits)
        _check_budget(body)
        with renaming(chat.names):
            job = self._chats.prepare(chat.body, chosen)
        rename(job, chat.names)
        job.telling = Telling(stream=bool(body.stream))
        effort = None if body.output_config is None else body.output_config.effort
        if not self._chats.thinking.heeds(effort):
            job.ignored.append("output_config.effort")
        return job

    def count(self, body: CountRequest, chosen: Chosen) -> Document:
        """Return the answer that says how many tokens the prompt has. Raises RequestError."""
        chat = chat_of(body, self._template(body), self._limits)
        with renaming(chat.names):
            count = self._chats.count(chat.body, chosen)
        return Document(orjson.dumps({"input_tokens": count}))

    def _template(self, body: CountRequest) -> dict[str, Json]:
        switch = self._switch(body.thinking)
        effort = None if body.output_config is None else body.output_config.effort
        return switch if effort is None else {**switch, **self._chats.thinking.wished(effort)}

    def _switch(self, thinking: ThinkingOptions | None) -> dict[str, Json]:
        if thinking is None:
            return self._chats.thinking.usually_off()
        match thinking.type:
            case "adaptive":
                return self._chats.thinking.if_able()
            case "enabled":
                return self._chats.thinking.switched(True, "thinking.type")
            case "disabled":
                return self._chats.thinking.switched(False, "thinking.type")
        raise invalid(
            "thinking.type",
            f"thinking.type must be enabled, adaptive or disabled, not {shown(thinking.type)}.",
        )


def _check_budget(body: MessageRequest) -> None:
    """Raise RequestError for a budget that Anthropic does not accept. A valid budget is only a wish: a model
    reasons until it is done or ``max_tokens`` is used up."""
    thinking = body.thinking
    if thinking is None or thinking.type != "enabled":
        return
    budget = thinking.budget_tokens
    if budget is None:
        raise invalid(
            "thinking.budget_tokens", "thinking.budget_tokens is required.", "missing_required_parameter"
        )
    if not MIN_BUDGET <= budget < body.max_tokens:
        raise invalid(
            "thinking.budget_tokens",
            f"thinking.budget_tokens must be at least {MIN_BUDGET} and less than max_tokens "
            f"({shown(body.max_tokens)}), not {shown(budget)}.",
        )
