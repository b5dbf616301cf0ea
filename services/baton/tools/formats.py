"""The formats that answers are parsed by, and which of them a model writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from types import MappingProxyType

from baton.tools.grammar import CallSpelling
from baton.tools.parsers import HermesParser, Llama3JsonParser, ToolParser
from baton.tools.reasoning import CLOSING, OPENING, ReasoningParser, ThinkParser

AUTO, NONE = "auto", "none"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The way a family of models writes tool calls."""

    parser: Callable[[Set[str]], ToolParser]
    """Makes a parser for one answer that may call functions of these names."""
    spelling: CallSpelling
    """The spelling in the grammar for forced calls."""
    markers: frozenset[str]
    """Texts that may be tokens of their own and must reach the parser."""
    signs: tuple[str, ...]
    """Texts that show a chat template to be of the family, if it has one of them."""
    foreign: tuple[str, ...] = ()
    """Texts that show a chat template not to be of the family, whatever ``signs`` it has."""
    special: bool = False
    """Whether the family's published tokenizers have the markers as special tokens."""

    def is_of(self, template: str) -> bool:
        """Whether a chat template shows this format."""
        shows = any(sign in template for sign in self.signs)
        return shows and not any(sign in template for sign in self.foreign)


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The way a family of models marks its reasoning."""

    always_opened: bool = False
    """Whether answers begin inside of the reasoning, whatever the prompt ends with."""
    markers: frozenset[str] = frozenset({OPENING, CLOSING})
    signs: tuple[str, ...] = ()

    def opened_by(self, prompt: str) -> bool:
        """Whether the answer to ``prompt`` begins inside of the reasoning."""
        return self.always_opened or prompt.rstrip().endswith(OPENING)

    def closed_by(self, prompt: str) -> bool:
        """Whether the ``prompt`` has ended the reasoning already, as templates do to turn it off."""
        return not self.always_opened and prompt.rstrip().endswith(CLOSING)

    def parser(self, *, opened: bool) -> ReasoningParser:
        """Make the reasoning parser of one answer."""
        return ThinkParser(opened=opened)


TOOL_FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {
        "hermes": ToolFormat(
            parser=HermesParser,
            spelling=CallSpelling("arguments", "<tool_call>\n", "\n</tool_call>"),
            markers=frozenset({HermesParser.opening, HermesParser.closing}),
            signs=("<tool_call>",),
            # Qwen3-Coder and GLM write XML between the same markers.
            foreign=("<function=", "<arg_key>"),
        ),
        "llama3_json": ToolFormat(
            parser=Llama3JsonParser,
            spelling=CallSpelling("parameters", separator="; "),
            markers=frozenset({Llama3JsonParser.opening}),
            # Llama 3.1 and 3.3 name the token; 3.2 only shows the format.
            signs=("<|python_tag|>", '{"name": function name, "parameters":'),
            special=True,
        ),
    }
)
"""Tool call formats by the names that ``--tool-call-parser`` takes. A new one needs a class with
`ToolParser`'s methods, and an entry here."""

REASONING_FORMATS: Mapping[str, ReasoningFormat] = MappingProxyType(
    {
        "think": ReasoningFormat(signs=(OPENING, CLOSING)),
        "deepseek_r1": ReasoningFormat(always_opened=True),
    }
)
"""Reasoning formats by the names that ``--reasoning-parser`` takes."""

TOOL_PARSERS = (AUTO, NONE, *TOOL_FORMATS)
REASONING_PARSERS = (AUTO, NONE, *REASONING_FORMATS)


def tool_format(wanted: str, template: str | None) -> ToolFormat | None:
    """Return the format that is ``wanted``; for ``auto``, the format that the chat template shows. None
    without one."""
    if wanted != AUTO:
        return TOOL_FORMATS.get(wanted)
    return next((format_ for format_ in TOOL_FORMATS.values() if format_.is_of(template or "")), None)


def reasoning_format(wanted: str, template: str | None) -> ReasoningFormat | None:
    """Return the format that is ``wanted``; for ``auto``, the format that the chat template shows. None
    without one."""
    if wanted != AUTO:
        return REASONING_FORMATS.get(wanted)
    for format_ in REASONING_FORMATS.values():
        if any(sign in (template or "") for sign in format_.signs):
            return format_
    return None
