"""The body of a request for a response, and the check for fields that are refused."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from baton.request.structured import StructuredOutputs
from baton.router.api.errors import invalid, shown

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
"""The ``include`` of clients that send reasoning back. Reasoning is told in the clear, so nothing is
added."""


class InputPart(msgspec.Struct, kw_only=True):
    """A part of an item: input_text, output_text, reasoning_text or refusal."""

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(msgspec.Struct, kw_only=True):
    """A message, function_call, function_call_output or reasoning; a message need not state its type."""

    type: str | None = None
    id: str | None = None
    status: Annotated[str, Meta(description="A last message that is incomplete is gone on with.")] | None = (
        None
    )
    role: str | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None


class ResponseTool(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A function that the model may call."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class ResponseToolChoice(msgspec.Struct, kw_only=True):
    """The choice of one function."""

    type: str
    name: str | None = None


class TextFormat(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The form of the answer: text, json_object or json_schema."""

    type: str
    name: str | None = None
    description: str | None = None
    schema: dict[str, object] | bool | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    """Options of the answer's text."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(msgspec.Struct, kw_only=True):
    """Options of reasoning: whether the model reasons first."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponseRequest(msgspec.Struct, kw_only=True):
    """Answer a text, or items: messages, calls and their results."""

    input: str | list[InputItem]
    model: str | None = None
    instructions: Annotated[str, Meta(description="A system message before the input.")] | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: (
        Annotated[str | ResponseToolChoice, Meta(description="none, auto, required, or one function.")] | None
    ) = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: dict[str, str] | None = None
    stream: bool | None = None
    stream_options: dict[str, object] | None = None
    seed: Annotated[int, Meta(description="The same seed makes the same draws.")] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    include_reasoning: bool | None = None
    cache_salt: str | None = None
    request_id: Annotated[str, Meta(description="The response's id.")] | None = None
    enable_response_messages: (
        Annotated[bool, Meta(description="Tell prompt and answer as text and tokens too.")] | None
    ) = None
    priority: Annotated[int, Meta(description="Lower goes first, where workers heed it.")] | None = None
    chat_template_kwargs: dict[str, object] | None = None
    store: Annotated[bool, Meta(description="Only false: no response is kept.")] | None = None
    background: Annotated[bool, Meta(description="Only false.")] | None = None
    previous_response_id: Annotated[str, Meta(description="Not supported.")] | None = None
    conversation: str | dict[str, object] | None = None
    prompt: dict[str, object] | None = None
    truncation: Annotated[str, Meta(description="Only disabled.")] | None = None


def raw_message(text: str, token_ids: list[int]) -> dict[str, object]:
    """Return a text and its tokens in the shape of vLLM's ``input_messages`` and ``output_messages``."""
    return {"type": "raw_message_tokens", "message": text, "tokens": token_ids}


AS_IN_CHATS = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", "ignore_eos"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("stop", "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens"),
    *("structured_outputs", "include_reasoning", "cache_salt", "request_id", "priority"),
    *("top_logprobs", "parallel_tool_calls"),
)
"""The fields that a chat has by the same name and of the same meaning."""


def check_refused(body: ResponseRequest) -> None:
    """Raise RequestError for a part of a field that would have to be ignored to answer."""
    for index, wanted in enumerate(body.include or []):
        if wanted not in (LOGPROBS, ENCRYPTED):
            raise invalid(
                f"include[{index}]",
                f"include[{index}] must be {LOGPROBS} or {ENCRYPTED}, not {shown(wanted)}.",
            )
    if body.top_logprobs and LOGPROBS not in (body.include or ()):
        raise invalid("top_logprobs", f"top_logprobs is only allowed when include has {LOGPROBS}.")
    if body.text is not None and body.text.verbosity not in (None, "medium"):
        raise invalid(
            "text.verbosity",
            f'text.verbosity must be "medium", not {shown(body.text.verbosity)}.',
            "unsupported",
        )
    reasoning = body.reasoning or ReasoningOptions()
    for name in ("summary", "generate_summary"):
        if getattr(reasoning, name) not in (None, "auto"):
            param = f"reasoning.{name}"
            raise invalid(
                param,
                f'{param} must be "auto", not {shown(getattr(reasoning, name))}: reasoning is told in full.',
                "unsupported",
            )
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "stream_options is only allowed when stream is true.")
