"""The bodies of HTTP requests. Types are strict; ranges are checked by the core, the same for all
protocols."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from baton.request.messages import ChatMessage
from baton.request.tools import NamedTool, Tool
from baton.request.truncation import Truncation
from baton.router.api.http.openai.structured import StructuredFields


class StreamOptions(msgspec.Struct, kw_only=True):
    """Options of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationFields(StructuredFields, kw_only=True):
    """The fields that completions and chat completions share."""

    model: str | None = None
    n: Annotated[int, Meta(description="Choices for each prompt.")] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    echo: Annotated[bool, Meta(description="Begin with the prompt, or the last turn.")] | None = None
    return_token_ids: Annotated[bool, Meta(description="Answer with token ids too.")] | None = None
    return_tokens_as_token_ids: (
        Annotated[bool, Meta(description="Name tokens token_id:N in log-probabilities.")] | None
    ) = None
    cache_salt: (
        Annotated[str, Meta(description="Share cached prompts only with requests of the same salt.")] | None
    ) = None
    priority: Annotated[int, Meta(description="Lower goes first, where workers heed it.")] | None = None
    request_id: Annotated[str, Meta(description="The client's own name of the request.")] | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None


class CompletionRequest(GenerationFields, kw_only=True):
    """Complete one or several prompts, each a text or token ids."""

    prompt: str | list[int | str | list[int]]
    logprobs: (
        Annotated[int, Meta(description="Tell log-probabilities and so many likeliest tokens.")] | None
    ) = None


class ChatRequest(GenerationFields, kw_only=True):
    """Answer a chat."""

    messages: list[ChatMessage]
    logprobs: Annotated[bool, Meta(description="Tell log-probabilities.")] | None = None
    top_logprobs: Annotated[int, Meta(description="With logprobs: how many likeliest tokens.")] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: (
        Annotated[bool, Meta(description="Go on with the last message, instead of beginning one.")] | None
    ) = None
    documents: Annotated[list[dict[str, str]], Meta(description="For the chat template.")] | None = None
    chat_template_kwargs: dict[str, object] | None = None
    reasoning_effort: (
        Annotated[str, Meta(description="none, or as much as the model's chat template knows grades.")] | None
    ) = None
    max_completion_tokens: Annotated[int, Meta(description="Newer name of max_tokens.")] | None = None
    tools: Annotated[list[Tool], Meta(description="Functions that the model may call.")] | None = None
    tool_choice: (
        Annotated[str | NamedTool, Meta(description="none, auto, required, or one function.")] | None
    ) = None
    parallel_tool_calls: (
        Annotated[bool, Meta(description="Whether an answer may hold several calls.")] | None
    ) = None
    include_reasoning: (
        Annotated[bool, Meta(description="False leaves the reasoning out of the answer.")] | None
    ) = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Tokenize a text, or the prompt that messages make."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, object] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Turn tokens back into text."""

    model: str | None = None
    tokens: list[int]


class TextRequest(msgspec.Struct, kw_only=True):
    """The prompt of a call over gRPC."""

    model: str | None = None
    text: str
    truncation: Truncation | None = None
