"""The body of a request for a message, and the check for fields that are refused."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from baton.router.api.errors import invalid, shown


class ContentBlock(msgspec.Struct, kw_only=True):
    """A part of a message: text, tool_use, tool_result, thinking or redacted_thinking."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, object] | None = None
    tool_use_id: str | None = None
    content: str | list[ContentBlock] | None = None
    is_error: bool | None = None


class InputMessage(msgspec.Struct, kw_only=True):
    """One message of the conversation."""

    role: Annotated[str, Meta(description="user, assistant or system.")]
    content: str | list[ContentBlock]


class MessageTool(msgspec.Struct, kw_only=True):
    """A function that the model may call."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, object] | None = None
    strict: bool | None = None


class MessageToolChoice(msgspec.Struct, kw_only=True):
    """The choice of tools: auto, any, tool (with its name) or none."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingOptions(msgspec.Struct, kw_only=True):
    """Whether the model reasons first: enabled, adaptive or disabled."""

    type: str
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    """A schema that the answer follows."""

    type: str
    schema: dict[str, object] | bool | None = None


class OutputOptions(msgspec.Struct, kw_only=True):
    """The form of the answer."""

    format: OutputFormat | None = None
    effort: str | None = None


class ContextEdit(msgspec.Struct, kw_only=True):
    """An edit of a long conversation, which says what to keep."""

    type: str
    keep: str | dict[str, object] | None = None


class ContextManagement(msgspec.Struct, kw_only=True):
    """Edits of the conversation; only edits that keep everything are allowed."""

    edits: list[ContextEdit] | None = None


class CountRequest(msgspec.Struct, kw_only=True):
    """Count the tokens of a conversation."""

    messages: list[InputMessage]
    model: str | None = None
    system: str | list[ContentBlock] | None = None
    tools: list[MessageTool] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputOptions | None = None
    container: str | dict[str, object] | None = None
    context_management: ContextManagement | None = None
    cache_control: Annotated[dict[str, object], Meta(description="All prompts are cached.")] | None = None
    mcp_servers: list[dict[str, object]] | None = None
    chat_template_kwargs: dict[str, object] | None = None


class MessageRequest(CountRequest, kw_only=True):
    """Go on with a conversation."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    cache_salt: (
        Annotated[str, Meta(description="Share cached prompts only with requests of the same salt.")] | None
    ) = None
    inference_geo: str | None = None


EFFORTS = ("low", "medium", "high", "xhigh", "max")


def check_refused(body: CountRequest) -> None:
    """Raise RequestError for a part of a field that would have to be ignored to answer."""
    for index, edit in enumerate((body.context_management or ContextManagement()).edits or ()):
        if edit.keep != "all":
            param = f"context_management.edits[{index}].keep"
            raise invalid(
                param,
                f'{param} must be "all", not {shown(edit.keep)}: this server never edits a conversation.',
                "unsupported",
            )
    options = body.output_config
    if options is not None and options.effort not in (None, *EFFORTS):
        raise invalid(
            "output_config.effort",
            f"output_config.effort must be one of {', '.join(EFFORTS)}, not {shown(options.effort)}.",
        )
    if options is not None and options.format is not None and options.format.type != "json_schema":
        raise invalid(
            "output_config.format.type",
            f'output_config.format.type must be "json_schema", not {shown(options.format.type)}.',
        )
    if isinstance(body, MessageRequest) and body.temperature is not None and body.temperature > 1:
        raise invalid("temperature", f"temperature must be between 0 and 1, not {body.temperature!r}.")
