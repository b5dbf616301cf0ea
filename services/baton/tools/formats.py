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
    """How a family of models writes calls of tools."""

    parser: Callable[[Set[str]], ToolParser]
    """Makes one for an answer that may call functions of these names."""
    spelling: CallSpelling
    """For the grammar of calls that must be made."""
    markers: frozenset[str]
    """Texts that may be special tokens: they must reach the parser."""
    signs: tuple[str, ...]
    """A chat template that has one of these is of the family,"""
    foreign: tuple[str, ...] = ()
    """unless it has one of these, too."""

    def is_of(self, template: str) -> bool:
        """Whether a chat template shows this format."""
        shows = any(sign in template for sign in self.signs)
        return shows and not any(sign in template for sign in self.foreign)


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family of models marks its reasoning."""

    always_opened: bool = False
    """Answers begin inside, whatever the prompt ends with."""
    markers: frozenset[str] = frozenset({OPENING, CLOSING})
    signs: tuple[str, ...] = ()

    def opened_by(self, prompt: str) -> bool:
        """Whether the answer to ``prompt`` begins inside of the reasoning."""
        return self.always_opened or prompt.rstrip().endswith(OPENING)

    def closed_by(self, prompt: str) -> bool:
        """Whether the ``prompt`` has ended the reasoning already, as templates do that are to turn it off."""
        return not self.always_opened and prompt.rstrip().endswith(CLOSING)

    def parser(self, *, opened: bool) -> ReasoningParser:
        """One for an answer."""
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
        ),
    }
)
"""By the names that ``--tool-call-parser`` takes. To add one: a class with `ToolParser`'s methods, and an
entry."""

REASONING_FORMATS: Mapping[str, ReasoningFormat] = MappingProxyType(
    {
        "think": ReasoningFormat(signs=(OPENING, CLOSING)),
        "deepseek_r1": ReasoningFormat(always_opened=True),
    }
)
"""By the names that ``--reasoning-parser`` takes."""

TOOL_PARSERS = (AUTO, NONE, *TOOL_FORMATS)
REASONING_PARSERS = (AUTO, NONE, *REASONING_FORMATS)


def tool_format(wanted: str, template: str | None) -> ToolFormat | None:
    """The format that is ``wanted``; for ``auto``, that of the chat template, if it shows one."""
    if wanted != AUTO:
        return TOOL_FORMATS.get(wanted)
    return next((format_ for format_ in TOOL_FORMATS.values() if format_.is_of(template or "")), None)


def reasoning_format(wanted: str, template: str | None) -> ReasoningFormat | None:
    """Likewise for reasoning."""
    if wanted != AUTO:
        return REASONING_FORMATS.get(wanted)
    for format_ in REASONING_FORMATS.values():
        if any(sign in (template or "") for sign in format_.signs):
            return format_
    return None
