"""The messages of a chat, as its template gets them."""

from __future__ import annotations

from collections.abc import Sequence

from baton.router.api.errors import invalid, shown
from baton.router.api.http.schemas import ContentPart, Message
from baton.text.config import Json

ROLES = ("system", "developer", "user", "assistant")


def template_messages(messages: Sequence[Message]) -> list[dict[str, Json]]:
    """``messages`` for the chat template. Raises ApiError for what it cannot hold: tools, images."""
    if not messages:
        raise invalid("messages", "messages is empty; it must hold at least one message.", "empty_array")
    return [_template_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _template_message(message: Message, at: str) -> dict[str, Json]:
    if message.role in ("tool", "function") or message.tool_calls or message.tool_call_id:
        raise invalid(at, f"{at}: tool calls are not supported by this server yet.", "unsupported")
    if message.role not in ROLES:
        raise invalid(
            f"{at}.role", f"{at}.role must be one of {', '.join(ROLES)}, not {shown(message.role)}."
        )
    if message.content is None:
        raise invalid(f"{at}.content", f"{at}.content is required.", "missing_required_parameter")
    rendered: dict[str, Json] = {"role": message.role, "content": _text(message.content, f"{at}.content")}
    if message.name is not None:
        rendered["name"] = message.name
    if message.reasoning_content is not None:
        rendered["reasoning_content"] = message.reasoning_content
    return rendered


def _text(content: str | list[ContentPart], at: str) -> str:
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for index, part in enumerate(content):
        if part.type != "text":
            raise invalid(
                f"{at}[{index}].type",
                f"{at}[{index}].type is {shown(part.type)}; only text is supported by this server yet.",
                "unsupported",
            )
        if part.text is None:
            raise invalid(
                f"{at}[{index}].text", f"{at}[{index}].text is required.", "missing_required_parameter"
            )
        texts.append(part.text)
    return "\n".join(texts)
