"""The form required of an answer, as clients write it: vLLM's ``structured_outputs``."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeAlias

import msgspec

from baton.core.structured_output import StructuredOutput, choice_text
from baton.request.errors import invalid, shown

Schema: TypeAlias = dict[str, object] | str | bool
"""A JSON schema, as an object or as JSON text."""


_SPACING = "white space in JSON is the model's choice"

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "disable_any_whitespace": _SPACING,
        "disable_additional_properties": "say additionalProperties in the schema",
        "whitespace_pattern": _SPACING,
        "structural_tag": "tools and grammar say where a form begins",
    }
)
"""vLLM's fields that are refused unless they ask for nothing, and why."""

FORMS = ("json", "json_object", "regex", "choice", "grammar")


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The form required of an answer, in exactly one of the first five fields. The others are vLLM's, and
    must ask for nothing."""

    json: Schema | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None
    structural_tag: str | None = None


def form_of(asked: StructuredOutputs) -> StructuredOutput:
    """Return the form that is given. Raises RequestError unless there is exactly one."""
    for name, why in REFUSED.items():
        value = getattr(asked, name)
        if value not in (None, False):
            param = f"structured_outputs.{name}"
            raise invalid(param, f"{param} is not supported (got {shown(value)}): {why}.", "unsupported")
    given = forms(asked)
    if len(given) != 1:
        named = " and ".join(given) or "none of them"
        raise invalid(
            "structured_outputs",
            f"structured_outputs must have exactly one of {', '.join(FORMS)}, not {named}.",
        )
    [output] = given.values()
    return output


def forms(asked: StructuredOutputs) -> dict[str, StructuredOutput]:
    """Return the forms that are given, by their fields."""
    found = {}
    if asked.json is not None:
        found["json"] = StructuredOutput("json_schema", schema_text(asked.json))
    if asked.json_object:
        found["json_object"] = StructuredOutput("json_object")
    if asked.regex is not None:
        found["regex"] = StructuredOutput("regex", asked.regex)
    if asked.choice is not None:
        found["choice"] = StructuredOutput("choice", choice_text(asked.choice))
    if asked.grammar is not None:
        found["grammar"] = StructuredOutput("grammar", asked.grammar)
    return found


def schema_text(schema: Schema) -> str:
    """Return the schema as JSON text. Raises RequestError if it is nested too deeply."""
    if isinstance(schema, str):
        return schema
    try:
        return msgspec.json.encode(schema).decode()
    except RecursionError:
        raise invalid(None, "A JSON schema is nested too deeply.") from None
