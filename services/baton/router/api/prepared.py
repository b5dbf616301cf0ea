"""What is left of a request's body once it is read: checked, rendered and tokenized.

Structs of msgspec, since a body that is read in another process comes back as msgpack.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from baton.router.api.menu import Menu
from baton.router.api.prompts import Echo
from baton.sampling_params import SamplingParams
from baton.structured_output import StructuredOutput

Endpoint: TypeAlias = Literal[
    "completion", "chat", "response", "message", "count", "tokenize", "detokenize", "text"
]
"""What a body is read for. ``text`` is a prompt of gRPC's, which has no body."""

ID_TYPE = "i"
"""Of arrays of token ids: 32 bits each."""

UsageMode: TypeAlias = Literal["none", "final", "continuous"]


class Assignment(msgspec.Struct, frozen=True, array_like=True):
    """What has to be known to read a body, besides the body."""

    endpoint: Endpoint
    menu: Menu


class Telling(msgspec.Struct, frozen=True, array_like=True):
    """How an answer is told."""

    stream: bool = False
    usage: UsageMode = "none"
    """In a stream."""
    token_ids: bool = False


class FormatAsked(msgspec.Struct, frozen=True, array_like=True):
    """How answers are parsed, as far as it follows from the request: the formats are those of its model."""

    reasoning: bool
    opened: bool
    """Answers begin inside of the reasoning."""
    closed: bool
    """The reasoning is over before they begin."""
    tells_reasoning: bool
    tools: bool
    names: frozenset[str]
    """Functions that may be called."""
    several: bool


class Repeated(msgspec.Struct, frozen=True, array_like=True):
    """What a response of OpenAI's repeats of its request. Bytes are JSON."""

    instructions: bytes
    metadata: bytes
    tool_choice: bytes
    tools: bytes
    format: bytes
    max_output_tokens: int | None
    parallel_tool_calls: bool
    top_logprobs: int
    effort: str | None


class PreparedJob(msgspec.Struct, kw_only=True, tag="job"):
    """A request that only has to be let in."""

    model: int
    """Its place in the menu."""
    prompts: list[list[int]]
    params: SamplingParams
    n: int
    priority: int | None
    cache_salt: str | None
    seeded: bool
    skip_special_tokens: bool
    echoes: list[Echo]
    only_echo: bool = False
    prompt_logprobs: int | None
    tokens_as_ids: bool
    grammars: list[tuple[str, StructuredOutput]]
    """To be checked, each with the field that asks for it."""
    format: FormatAsked | None = None
    open_ended: bool = False
    """See `Job.open_ended`."""
    prompt_param: str
    """The field with the prompts, by the name that its protocol has for it,"""
    max_tokens_param: str = "max_tokens"
    """and that with the length of the answers."""
    telling: Telling
    repeated: Repeated | None = None
    """Of a response."""


class Document(msgspec.Struct, frozen=True, tag="document"):
    """The whole answer to a request that nothing is generated for."""

    content: bytes
