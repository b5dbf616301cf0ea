"""The form that an answer is to have, as people write it: vLLM's ``structured_outputs``."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from baton.request.errors import invalid
from baton.structured_output import StructuredOutput, choice_text

Schema: TypeAlias = dict[str, object] | str | bool
"""A JSON schema, as it is or as JSON text."""


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Exactly one of these."""

    json: Schema | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


def form_of(asked: StructuredOutputs) -> StructuredOutput:
    """The one that is given. RequestError if there is not exactly one."""
    given = forms(asked)
    if len(given) != 1:
        named = " and ".join(given) or "none of them"
        raise invalid(
            "structured_outputs",
            f"structured_outputs must have exactly one of {', '.join(asked.__struct_fields__)}, not {named}.",
        )
    [output] = given.values()
    return output


def forms(asked: StructuredOutputs) -> dict[str, StructuredOutput]:
    """What is given, by its field."""
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
    """As JSON. RequestError if it cannot be."""
    if isinstance(schema, str):
        return schema
    try:
        return msgspec.json.encode(schema).decode()
    except RecursionError:
        raise invalid(None, "A JSON schema is nested too deeply.") from None
