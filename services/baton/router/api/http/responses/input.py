"""The conversion of a request for a response to a chat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from baton.request.limits import ConversationLimits, check_at_most
from baton.request.messages import CalledFunction, ChatMessage, ContentPart, ToolCall
from baton.request.tools import Function, NamedFunction, NamedTool, Tool
from baton.router.api.errors import invalid, shown
from baton.router.api.http.openai.renaming import Names
from baton.router.api.http.openai.schemas import ChatRequest
from baton.router.api.http.openai.structured import JsonSchemaFormat, ResponseFormat
from baton.router.api.http.responses.fields import (
    AS_IN_CHATS,
    LOGPROBS,
    InputItem,
    InputPart,
    ResponseRequest,
    ResponseTool,
    ResponseToolChoice,
    TextFormat,
)
from baton.text.config import Json

Given = TypeVar("Given")
Texts: TypeAlias = str | list[InputPart]

_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")

_INCOMPLETE = ("in_progress", "incomplete")

_FIELDS = (
    ("messages", "input"),
    ("max_completion_tokens", "max_output_tokens"),
    (r"response_format\.json_schema\.schema", "text.format.schema"),
    (r"response_format\.json_schema", "text.format"),
    ("response_format", "text.format"),
    (r"tools\[(\d+)\]\.function", r"tools[\1]"),
    (r"tool_choice\.function", "tool_choice"),
)


@dataclass(frozen=True, slots=True)
class ResponsesChat:
    """A request as a chat, and the request's names for the chat's fields."""

    body: ChatRequest
    names: Names


def chat_of(body: ResponseRequest, template: dict[str, Json], limits: ConversationLimits) -> ResponsesChat:
    """Return the chat that ``body`` asks for; ``template`` are variables that the request's own override.

    Raises RequestError for items that a chat cannot hold, and for more of them than one request may have.
    """
    if not isinstance(body.input, str):
        _check_at_mosts(body.input, limits)
    messages = _Messages()
    if body.instructions is not None:
        messages.add(ChatMessage(role="system", content=body.instructions), "instructions")
    items = [InputItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    for index, item in enumerate(items):
        messages.add_item(item, "input" if isinstance(body.input, str) else f"input[{index}]")
    chat = ChatRequest(
        model=body.model,
        messages=messages.all if items else [],
        max_completion_tokens=body.max_output_tokens,
        logprobs=True if LOGPROBS in (body.include or ()) else None,
        tools=None if body.tools is None else [_tool(t, f"tools[{i}]") for i, t in enumerate(body.tools)],
        tool_choice=_tool_choice(body.tool_choice),
        response_format=_format(None if body.text is None else body.text.format),
        continue_final_message=_continues(items[-1]) if items else None,
        chat_template_kwargs={**template, **(body.chat_template_kwargs or {})} or None,
        **{name: getattr(body, name) for name in AS_IN_CHATS},
    )
    return ResponsesChat(chat, Names(_FIELDS, messages.places, messages.calls))


def _continues(last: InputItem) -> bool:
    """Whether the answer goes on with the ``last`` item: an incomplete message of the assistant's."""
    return last.type in (None, "message") and last.role == "assistant" and last.status in _INCOMPLETE


def _check_at_mosts(items: Sequence[InputItem], limits: ConversationLimits) -> None:
    check_at_most("input", "items", len(items), limits.max_messages)
    parts = sum(
        len(given) for item in items for given in (item.content, item.output) if isinstance(given, list)
    )
    check_at_most("input", "parts in all", parts, limits.max_parts)


@dataclass(slots=True)
class _Messages:
    """Collects items as messages: consecutive reasoning, text and calls of the assistant are one turn."""

    all: list[ChatMessage] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    calls: dict[tuple[int, int], str] = field(default_factory=dict)
    """The field that each call came from, by the indices of its message and of the call."""

    def add(self, message: ChatMessage, at: str) -> None:
        self.all.append(message)
        self.places.append(at)

    def add_item(self, item: InputItem, at: str) -> None:
        match item.type:
            case None | "message":
                self._add_message(item, at)
            case "function_call":
                self._add_call(item, at)
            case "function_call_output":
                _need(item.call_id, f"{at}.call_id")
                text = _text(item.output, f"{at}.output")
                self.add(ChatMessage(role="tool", content=text, tool_call_id=item.call_id), at)
            case "reasoning":
                # Without content it was summarised or encrypted, and only the server that wrote it could read
                # it.
                if item.content is not None:
                    self._turn(at, new=True).reasoning_content = _joined(item.content, f"{at}.content")
            case "item_reference":
                raise invalid(
                    f"{at}.type",
                    f"{at} refers to a stored item, but this server keeps none; send the item itself.",
                    "unsupported",
                )
            case _:
                raise invalid(
                    f"{at}.type",
                    f"{at}.type must be message, function_call, function_call_output or reasoning, not "
                    f"{shown(item.type)}.",
                    "unsupported",
                )

    def _add_message(self, item: InputItem, at: str) -> None:
        role = _need(item.role, f"{at}.role")
        if role == "tool":
            raise invalid(f"{at}.role", f"{at}.role must not be tool: send a function_call_output.")
        if role != "assistant":
            self.add(ChatMessage(role=role, content=_text(item.content, f"{at}.content")), at)
            return
        turn = self._turn(at, new=False)
        if turn.content is not None or turn.tool_calls:
            turn = self._turn(at, new=True)
        turn.content = _text(item.content, f"{at}.content")

    def _add_call(self, item: InputItem, at: str) -> None:
        call = ToolCall(
            function=CalledFunction(_need(item.name, f"{at}.name"), _need(item.arguments, f"{at}.arguments")),
            id=_need(item.call_id, f"{at}.call_id"),
        )
        turn = self._turn(at, new=False)
        if turn.tool_calls is None:
            turn.tool_calls = []
        self.calls[len(self.all) - 1, len(turn.tool_calls)] = at
        turn.tool_calls.append(call)

    def _turn(self, at: str, *, new: bool) -> ChatMessage:
        """Return the assistant's turn that the item at ``at`` belongs to."""
        if new or not self.all or self.all[-1].role != "assistant":
            self.add(ChatMessage(role="assistant"), at)
        return self.all[-1]


def _need(value: Given | None, at: str) -> Given:
    if value is None:
        raise invalid(at, f"{at} is required.", "missing_required_parameter")
    return value


def _text(content: Texts | None, at: str) -> str | list[ContentPart]:
    if content is None:
        raise invalid(at, f"{at} is required.", "missing_required_parameter")
    if isinstance(content, str):
        return content
    parts: list[ContentPart] = []
    for index, part in enumerate(content):
        where = f"{at}[{index}]"
        if part.type == "refusal":
            parts.append(ContentPart("text", _need(part.refusal, f"{where}.refusal")))
        elif part.type in _TEXTS:
            parts.append(ContentPart("text", _need(part.text, f"{where}.text")))
        else:
            raise invalid(
                f"{where}.type",
                f"{where}.type is {shown(part.type)}; only text is supported by this server yet.",
                "unsupported",
            )
    return parts


def _joined(content: Texts, at: str) -> str:
    text = _text(content, at)
    return text if isinstance(text, str) else "\n".join(part.text or "" for part in text)


def _tool(tool: ResponseTool, at: str) -> Tool:
    if tool.type != "function":
        raise invalid(
            f"{at}.type",
            f'{at}.type must be "function", not {shown(tool.type)}: this server runs no tools itself.',
            "unsupported",
        )
    name = _need(tool.name, f"{at}.name")
    return Tool("function", Function(name, tool.description, tool.parameters, tool.strict))


def _tool_choice(choice: str | ResponseToolChoice | None) -> str | NamedTool | None:
    if not isinstance(choice, ResponseToolChoice):
        return choice
    if choice.type != "function":
        raise invalid(
            "tool_choice.type",
            f'tool_choice.type must be "function", not {shown(choice.type)}.',
            "unsupported",
        )
    return NamedTool("function", NamedFunction(_need(choice.name, "tool_choice.name")))


def _format(asked: TextFormat | None) -> ResponseFormat | None:
    if asked is None:
        return None
    if asked.type != "json_schema":
        return ResponseFormat(type=asked.type)
    schema = JsonSchemaFormat(
        name=asked.name, description=asked.description, schema=asked.schema, strict=asked.strict
    )
    return ResponseFormat(type="json_schema", json_schema=schema)
