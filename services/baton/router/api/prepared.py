"""A request whose body is read: checked, rendered and tokenized.

The classes are structs of msgspec, since a body that is read in another process comes back as msgpack.
"""

from __future__ import annotations

import re
from typing import Literal, TypeAlias

import msgspec

from baton.core.sampling_params import ResolvedSampling
from baton.core.structured_output import StructuredOutput
from baton.router.api.menu import Menu
from baton.router.api.prompts import Echo

Endpoint: TypeAlias = Literal[
    "completion", "chat", "response", "message", "count", "tokenize", "detokenize", "text"
]
"""The purpose that a body is read for. ``text`` is a prompt of gRPC's, which has no body."""

ID_TYPE = "i"
"""The type code of arrays of token ids: 32 bits each."""

CLIENT_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
"""A client's own id of a request: what can be sent back in a header, and told, safely."""

UsageMode: TypeAlias = Literal["none", "final", "continuous"]


CHATS: frozenset[Endpoint] = frozenset({"chat", "response", "message", "count"})
"""The endpoints whose bodies a chat template makes a prompt of."""


class Assignment(msgspec.Struct, frozen=True, array_like=True, tag="body"):
    """What must be known to read a body, besides the body."""

    endpoint: Endpoint
    menu: Menu
    refused_templates: dict[int, str] = {}
    """Why chats for a model are refused, by its place in the menu; without the models that chats may ask."""


class Telling(msgspec.Struct, frozen=True, array_like=True):
    """How an answer is presented."""

    stream: bool = False
    usage: UsageMode = "none"
    """The chunks of a stream that report usage: none, the final one, or all."""
    token_ids: bool = False


class FormatAsked(msgspec.Struct, frozen=True, array_like=True):
    """How answers are parsed, as far as the request decides it: the formats themselves are the model's."""

    reasoning: bool
    opened: bool
    """Whether answers begin inside the reasoning."""
    closed: bool
    """Whether the reasoning is over before answers begin."""
    tells_reasoning: bool
    tools: bool
    names: frozenset[str]
    """The functions that may be called."""
    several: bool
    guided: bool = False
    """Whether the answers follow a grammar."""


class Repeated(msgspec.Struct, frozen=True, array_like=True):
    """The fields of a request that OpenAI's response repeats. Bytes are JSON."""

    instructions: bytes
    metadata: bytes
    tool_choice: bytes
    tools: bytes
    format: bytes
    max_output_tokens: int | None
    parallel_tool_calls: bool
    top_logprobs: int
    effort: str | None
    input_messages: bytes | None = None
    """The prompt as text and tokens; None: neither prompt nor answer is told so."""


class PreparedJob(msgspec.Struct, kw_only=True, tag="job"):
    """A request that is ready for admission."""

    model: int
    """The model's place in the menu."""
    prompts: list[list[int]]
    params: ResolvedSampling
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
    """The grammars to check, each with the field that asks for it."""
    format: FormatAsked | None = None
    open_ended: bool = False
    """See `Job.open_ended`."""
    prompt_param: str
    """The field with the prompts, as its protocol names it."""
    max_tokens_param: str = "max_tokens"
    """The field with the length of the answers, as its protocol names it."""
    telling: Telling
    repeated: Repeated | None = None
    """The fields that a response repeats; None for other endpoints."""
    client_id: str | None = None
    """The client's own id of the request, where the body has it."""
    ignored: list[str] = msgspec.field(default_factory=list)
    """The fields that are not acted on, and cannot change the answer."""


class Document(msgspec.Struct, tag="document"):
    """The whole answer to a request that nothing is generated for."""

    content: bytes
    ignored: list[str] = msgspec.field(default_factory=list)
    """The fields that were not acted on."""
