"""The limits and defaults of the client-facing APIs."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.request.defaults import SamplingDefaults
from baton.request.limits import MAX_ANSWERS, ConversationLimits, SamplingLimits
from baton.request.tools import ToolLimits
from baton.tools.formats import AUTO


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings(SamplingLimits):
    """Limits for every client, HTTP or gRPC. Each bounds the memory or work of one request."""

    max_body_bytes: int = 8 * 1024 * 1024
    max_n: int = MAX_ANSWERS
    max_choices: int = 256
    """The most choices of a request, prompts times ``n``: each is one request to the workers."""
    max_tokenize_bytes: int = 1024 * 1024
    """The most bytes of a text at ``/tokenize``, in UTF-8."""
    max_tokenize_tokens: int = 512 * 1024
    """The most tokens of a text at ``/tokenize``: each takes 270 bytes while it is made."""
    max_detokenize_tokens: int = 1024 * 1024
    max_counted_tokens: int = 512 * 1024
    """The most tokens that ``count_tokens`` counts; a conversation may be longer than the context."""
    max_prompt_tokens: int = 1024 * 1024
    """The most tokens of all prompts of one request together; a single prompt may fill the context."""
    max_told_tokens: int = 1024 * 1024
    """The most prompt tokens that the choices of one request repeat, by ``echo`` or ``return_token_ids``."""
    max_told_chars: int = 8 * 1024 * 1024
    """The most characters of prompts that the choices of one request repeat."""
    conversation: ConversationLimits = field(default_factory=ConversationLimits)
    default_max_tokens: int = 16
    """The ``max_tokens`` of ``/v1/completions`` by default, as OpenAI's; a chat may fill the context."""
    retry_after_seconds: int = 1
    """The time that a client is told to wait if the ring is full or not ready, in seconds."""
    max_stream_backlog: int = 1024 * 1024
    """The most bytes of a stream that wait for a client that reads too slowly; with more the stream is cut
    off."""
    slow_client_seconds: float = 30.0
    """The time after which a stream is cut off if its client reads nothing, in seconds."""
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    """The model's sampling defaults."""
    tools: ToolLimits = field(default_factory=ToolLimits)
    tool_call_parser: str = AUTO
    """A name in `baton.tools.formats.TOOL_PARSERS`; auto: what the chat template shows."""
    reasoning_parser: str = AUTO
    """A name in `baton.tools.formats.REASONING_PARSERS`; auto: what the chat template shows."""
