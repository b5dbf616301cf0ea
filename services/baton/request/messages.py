"""The messages of a chat, in the form that its template takes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from baton.request.errors import invalid, shown
from baton.request.limits import ConversationLimits, check_at_most
from baton.text.config import Json

ROLES = ("system", "developer", "user", "assistant", "tool")


class ContentPart(msgspec.Struct):
    """One part of a message's content: a text or, of the assistant's, a refusal."""

    type: str
    text: str | None = None
    refusal: str | None = None


class CalledFunction(msgspec.Struct):
    """A function as the assistant called it; ``arguments`` are a JSON object as text."""

    name: str
    arguments: str = ""


class ToolCall(msgspec.Struct):
    """One call in an assistant's message."""

    function: CalledFunction
    id: str | None = None
    type: str = "function"


class ChatMessage(msgspec.Struct):
    """One message of a chat."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


def check_messages(messages: Sequence[ChatMessage], limits: ConversationLimits) -> None:
    """Raise RequestError for more messages, or parts in all, than one request may have."""
    check_at_most("messages", "entries", len(messages), limits.max_messages)
    parts = sum(
        (len(message.content) if isinstance(message.content, list) else 0) + len(message.tool_calls or ())
        for message in messages
    )
    check_at_most("messages", "parts and calls in all", parts, limits.max_parts)


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Json]]:
    """Return ``messages`` for the chat template. Raises RequestError for content that it cannot take, such as
    images."""
    if not messages:
        raise invalid("messages", "messages is empty; it must hold at least one message.", "empty_array")
    rendered = [_template_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    called = {
        call.id: call.function.name for message in messages for call in message.tool_calls or [] if call.id
    }
    for message in rendered:
        # Some templates need the name of the function that returned; OpenAI's clients only give the call's
        # id.
        name = called.get(str(message.get("tool_call_id")))
        if message["role"] == "tool" and name is not None:
            message.setdefault("name", name)
    return rendered


def _template_message(message: ChatMessage, at: str) -> dict[str, Json]:
    if message.role not in ROLES:
        raise invalid(
            f"{at}.role", f"{at}.role must be one of {', '.join(ROLES)}, not {shown(message.role)}."
        )
    # An assistant's message may hold nothing but reasoning: clients send back what they received.
    if message.content is None and message.role != "assistant":
        raise invalid(f"{at}.content", f"{at}.content is required.", "missing_required_parameter")
    if message.tool_calls and message.role != "assistant":
        raise invalid(
            f"{at}.tool_calls", f"{at}.tool_calls is only allowed for the role assistant, not {message.role}."
        )
    # Templates concatenate contents: the content of a message with only calls is empty, not null.
    content = message.refusal if message.content is None else message.content
    rendered: dict[str, Json] = {"role": message.role, "content": _text(content, f"{at}.content")}
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    for name, value in (
        ("name", message.name),
        ("reasoning_content", reasoning),
        ("tool_call_id", message.tool_call_id),
    ):
        if value is not None:
            rendered[name] = value
    if message.tool_calls:
        rendered["tool_calls"] = [
            _template_call(call, f"{at}.tool_calls[{index}]") for index, call in enumerate(message.tool_calls)
        ]
    return rendered


def _template_call(call: ToolCall, at: str) -> Json:
    """Return a call as Hugging Face templates take it: with its arguments as an object, which the template
    writes."""
    where = f"{at}.function.arguments"
    if call.type != "function":
        raise invalid(f"{at}.type", f'{at}.type must be "function", not {shown(call.type)}.')
    try:
        arguments: Json = msgspec.json.decode(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise invalid(where, f"{where} must be a JSON object as text, not {shown(call.function.arguments)}.")
    rendered: dict[str, Json] = {
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments},
    }
    if call.id is not None:
        rendered["id"] = call.id
    return rendered


def _text(content: str | list[ContentPart] | None, at: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for index, part in enumerate(content):
        if part.type not in ("text", "refusal"):
            raise invalid(
                f"{at}[{index}].type",
                f"{at}[{index}].type is {shown(part.type)}; only text is supported by this server yet.",
                "unsupported",
            )
        text = part.text if part.type == "text" else part.refusal
        if text is None:
            where = f"{at}[{index}].{part.type}"
            raise invalid(where, f"{where} is required.", "missing_required_parameter")
        texts.append(text)
    return "\n".join(texts)
