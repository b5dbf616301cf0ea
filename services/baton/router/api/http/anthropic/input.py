"""The conversion of a request for a message to a chat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import orjson

from baton.request.limits import ConversationLimits, check_at_most
from baton.request.messages import CalledFunction, ChatMessage, ContentPart, ToolCall
from baton.request.tools import Function, NamedFunction, NamedTool, Tool
from baton.router.api.errors import invalid, shown
from baton.router.api.http.anthropic.fields import (
    ContentBlock,
    CountRequest,
    InputMessage,
    MessageRequest,
    MessageTool,
    MessageToolChoice,
)
from baton.router.api.http.openai.renaming import Names
from baton.router.api.http.openai.schemas import ChatRequest
from baton.router.api.http.openai.structured import JsonSchemaFormat, ResponseFormat
from baton.text.config import Json

Given = TypeVar("Given")

_FIELDS = (
    (r"response_format\.json_schema\.schema", "output_config.format.schema"),
    ("response_format", "output_config.format"),
    (r"tools\[(\d+)\]\.function\.parameters", r"tools[\1].input_schema"),
    (r"tools\[(\d+)\]\.function", r"tools[\1]"),
    (r"tool_choice\.function", "tool_choice"),
    ("stop", "stop_sequences"),
)

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


@dataclass(frozen=True, slots=True)
class MessagesChat:
    """A request as a chat, and the request's names for the chat's fields."""

    body: ChatRequest
    names: Names


def chat_of(body: CountRequest, template: dict[str, Json], limits: ConversationLimits) -> MessagesChat:
    """Return the chat that ``body`` asks to go on with, or to count; ``template`` are variables of the chat
    template.

    Raises RequestError for blocks that a chat cannot hold, and for more of them than one request may have.
    """
    _check_at_mosts(body, limits)
    messages = _Messages()
    if body.system:
        messages.add(ChatMessage(role="system", content=_texts(body.system, "system")), "system")
    turns = _turns(body)
    for index, turn in enumerate(turns):
        messages.add_turn(turn, f"messages[{index}]")
    choice = body.tool_choice
    chat = ChatRequest(
        model=body.model,
        messages=messages.all if turns else [],
        tools=None if body.tools is None else [_tool(t, f"tools[{i}]") for i, t in enumerate(body.tools)],
        tool_choice=_tool_choice(choice),
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
        response_format=_format(body),
        continue_final_message=len(turns) == len(body.messages) and _continues(body),
        chat_template_kwargs={**template, **(body.chat_template_kwargs or {})} or None,
    )
    if isinstance(body, MessageRequest):
        chat.cache_salt = body.cache_salt
        chat.max_tokens = body.max_tokens
        chat.stop = body.stop_sequences
        chat.temperature, chat.top_p, chat.top_k = body.temperature, body.top_p, body.top_k
    return MessagesChat(chat, Names(_FIELDS, messages.places))


def _continues(body: CountRequest) -> bool:
    """Whether the answer goes on with the last message, which is then the assistant's.

    Raises RequestError for a message that cannot be gone on with, as Anthropic's API does; where tokens are
    only counted, none is raised.
    """
    if not body.messages or body.messages[-1].role != "assistant":
        return False
    at, content = f"messages[{len(body.messages) - 1}]", body.messages[-1].content
    blocks = [ContentBlock(type="text", text=content)] if isinstance(content, str) else content
    if not isinstance(body, MessageRequest):
        return all(block.type != "tool_use" for block in blocks) and any(block.text for block in blocks)
    if body.thinking is not None and body.thinking.type == "enabled":
        raise invalid(
            f"{at}.role",
            f"{at}.role is assistant, but an answer that begins with reasoning cannot go on with a message.",
        )
    if any(block.type == "tool_use" for block in blocks):
        raise invalid(f"{at}.content", f"{at}.content has a tool_use; only a text can be gone on with.")
    last = blocks[-1].text or ""
    if not last:
        raise invalid(
            f"{at}.content", f"{at}.content does not end with a text, so it cannot be gone on with."
        )
    if last != last.rstrip():
        raise invalid(
            f"{at}.content",
            f"{at}.content ends with white space; a message that is gone on with must not.",
        )
    return True


def _turns(body: CountRequest) -> Sequence[InputMessage]:
    """Return the messages, without a last one of the assistant's that is empty: it says nothing."""
    if body.messages and body.messages[-1].role == "assistant" and not body.messages[-1].content:
        return body.messages[:-1]
    return body.messages


def _check_at_mosts(body: CountRequest, limits: ConversationLimits) -> None:
    check_at_most("messages", "entries", len(body.messages), limits.max_messages)
    contents = [turn.content for turn in body.messages]
    blocks = [block for content in (body.system, *contents) if isinstance(content, list) for block in content]
    nested = sum(len(block.content) for block in blocks if isinstance(block.content, list))
    check_at_most("messages", "blocks in all", len(blocks) + nested, limits.max_parts)


@dataclass(slots=True)
class _Messages:
    """Collects turns as messages: a tool's result is a message of its own."""

    all: list[ChatMessage] = field(default_factory=list)
    places: list[str] = field(default_factory=list)

    def add(self, message: ChatMessage, at: str) -> None:
        self.all.append(message)
        self.places.append(at)

    def add_turn(self, turn: InputMessage, at: str) -> None:
        if turn.role not in ("user", "assistant", "system"):
            raise invalid(
                f"{at}.role", f"{at}.role must be user, assistant or system, not {shown(turn.role)}."
            )
        if isinstance(turn.content, str):
            self.add(ChatMessage(role=turn.role, content=turn.content), at)
        elif turn.role == "system":
            self.add(ChatMessage(role="system", content=_texts(turn.content, f"{at}.content")), at)
        elif turn.role == "user":
            self._add_user(turn.content, f"{at}.content")
        else:
            self._add_assistant(turn.content, f"{at}.content")

    def _add_user(self, blocks: Sequence[ContentBlock], at: str) -> None:
        texts: list[ContentPart] = []
        for index, block in enumerate(blocks):
            where = f"{at}[{index}]"
            if block.type != "tool_result":
                texts.append(_text_part(block, where, "text or tool_result"))
                continue
            if texts:
                self.add(ChatMessage(role="user", content=texts), at)
                texts = []
            content = _texts(block.content or "", f"{where}.content")
            call_id = _need(block.tool_use_id, f"{where}.tool_use_id")
            self.add(ChatMessage(role="tool", content=content, tool_call_id=call_id), where)
        if texts or not blocks:
            self.add(ChatMessage(role="user", content=texts), at)

    def _add_assistant(self, blocks: Sequence[ContentBlock], at: str) -> None:
        turn = ChatMessage(role="assistant", content="")
        texts: list[ContentPart] = []
        thoughts: list[str] = []
        calls: list[ToolCall] = []
        for index, block in enumerate(blocks):
            where = f"{at}[{index}]"
            match block.type:
                case "thinking":
                    thoughts.append(_need(block.thinking, f"{where}.thinking"))
                case "redacted_thinking":
                    pass  # encrypted: only the server that wrote it could read it
                case "tool_use":
                    name = _need(block.name, f"{where}.name")
                    arguments = orjson.dumps(_need(block.input, f"{where}.input")).decode()
                    calls.append(ToolCall(CalledFunction(name, arguments), _need(block.id, f"{where}.id")))
                case _:
                    texts.append(_text_part(block, where, "text, thinking, redacted_thinking or tool_use"))
        if texts:
            turn.content = texts
        if thoughts:
            turn.reasoning_content = "".join(thoughts)
        turn.tool_calls = calls or None
        self.add(turn, at)


def _need(value: Given | None, at: str) -> Given:
    if value is None:
        raise invalid(at, f"{at} is required.", "missing_required_parameter")
    return value


def _texts(content: str | Sequence[ContentBlock], at: str) -> str | list[ContentPart]:
    if isinstance(content, str):
        return content
    return [_text_part(block, f"{at}[{index}]", "text") for index, block in enumerate(content)]


def _text_part(block: ContentBlock, at: str, allowed: str) -> ContentPart:
    if block.type != "text":
        raise invalid(
            f"{at}.type", f"{at}.type must be {allowed} here, not {shown(block.type)}.", "unsupported"
        )
    return ContentPart("text", _need(block.text, f"{at}.text"))


def _tool(tool: MessageTool, at: str) -> Tool:
    if tool.type not in (None, "custom"):
        raise invalid(
            f"{at}.type",
            f'{at}.type must be "custom", not {shown(tool.type)}: this server runs no tools itself.',
            "unsupported",
        )
    schema = _need(tool.input_schema, f"{at}.input_schema")
    return Tool("function", Function(tool.name, tool.description, schema, tool.strict))


def _tool_choice(choice: MessageToolChoice | None) -> str | NamedTool | None:
    if choice is None:
        return None
    if choice.type == "tool":
        return NamedTool("function", NamedFunction(_need(choice.name, "tool_choice.name")))
    if choice.type not in _CHOICES:
        raise invalid(
            "tool_choice.type",
            f"tool_choice.type must be auto, any, tool or none, not {shown(choice.type)}.",
        )
    return _CHOICES[choice.type]


def _format(body: CountRequest) -> ResponseFormat | None:
    if body.output_config is None or body.output_config.format is None:
        return None
    schema = JsonSchemaFormat(schema=body.output_config.format.schema)
    return ResponseFormat(type="json_schema", json_schema=schema)
