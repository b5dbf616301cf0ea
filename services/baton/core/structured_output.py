"""The form that an output must have. Shared by router and engine; imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import msgspec

from baton.v1 import inference_pb2 as pb

Kind = Literal["json_schema", "json_object", "regex", "choice", "grammar"]


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The source of a grammar: all that any process needs to check, compile and replay it.

    ``text`` is, by kind, a JSON schema as JSON text, nothing, a regular expression, a JSON array of strings,
    or a grammar in Lark's notation or GBNF (``name ::= …``). It is not checked here: ``baton.grammar`` does.
    """

    kind: Kind
    text: str = ""
    around: str = ""
    """A grammar of the whole output, in Lark's notation, where ``@form`` stands for the form asked for.
    Empty: the output is that form alone."""

    def to_proto(self) -> pb.StructuredOutput:
        """Raises ValueError if the text of a choice is not a JSON array of strings."""
        message = self._form()
        message.around = self.around
        return message

    def _form(self) -> pb.StructuredOutput:
        match self.kind:
            case "json_schema":
                return pb.StructuredOutput(json_schema=self.text)
            case "json_object":
                return pb.StructuredOutput(json_object=True)
            case "regex":
                return pb.StructuredOutput(regex=self.text)
            case "choice":
                options = msgspec.json.decode(self.text, type=list[str])
                return pb.StructuredOutput(choice=pb.Choices(options=options))
            case "grammar":
                return pb.StructuredOutput(grammar=self.text)

    @classmethod
    def from_proto(cls, message: pb.StructuredOutput) -> StructuredOutput | None:
        """Return the structured output, or None for a message that names no form."""
        kind = message.WhichOneof("form")
        return None if kind is None else cls(kind, _TEXT[kind](message), message.around)


FORM = "@form"
"""The rule that stands for the form asked for in ``StructuredOutput.around``."""


def choice_text(options: list[str]) -> str:
    """Return the ``text`` of a choice."""
    return msgspec.json.encode(options).decode()


_TEXT: Mapping[Kind, Callable[[pb.StructuredOutput], str]] = MappingProxyType(
    {
        "json_schema": lambda message: message.json_schema,
        "json_object": lambda message: "",
        "regex": lambda message: message.regex,
        "choice": lambda message: choice_text(list(message.choice.options)),
        "grammar": lambda message: message.grammar,
    }
)
