"""Recognizes grammars that are cheap to compile by their source alone."""

from __future__ import annotations

import msgspec

from baton.core.structured_output import StructuredOutput
from baton.grammar.limits import SIMPLE_BYTES, SIMPLE_DEPTH, SIMPLE_OPTIONS, SIMPLE_PROPERTIES
from baton.text.config import Json

_NOTES = frozenset(
    {"$schema", "$id", "$comment", "title", "description", "default", "examples", "deprecated"}
)
"""Keywords that do not change what a schema allows."""
_VALUES = frozenset({"type", "enum", "const", "required"})
"""Keywords whose cost is proportional to their length."""


def is_simple(output: StructuredOutput) -> bool:
    """Whether trying ``output`` out takes little time whatever its source says: any JSON object, a choice of
    few characters, or a small JSON schema without patterns, counts, references and conjunctions. A simple
    grammar may still be invalid."""
    if output.around or len(output.text) > SIMPLE_BYTES:
        return False
    match output.kind:
        case "json_object" | "choice":
            return True
        case "json_schema":
            return _is_simple_schema(output.text)
    return False


def _is_simple_schema(text: str) -> bool:
    try:
        schema: Json = msgspec.json.decode(text)
    except (ValueError, RecursionError):  # reported by check_source
        return False
    layer, properties = [schema], 0
    for _ in range(SIMPLE_DEPTH):
        found = [_parts(each) for each in layer]
        if None in found:
            return False
        properties += sum(_num_properties(each) for each in layer)
        if properties > SIMPLE_PROPERTIES:
            return False
        layer = [part for parts in found if parts is not None for part in parts]
        if not layer:
            return True
    return False


def _num_properties(schema: Json) -> int:
    given = schema.get("properties") if isinstance(schema, dict) else None
    return len(given) if isinstance(given, dict) else 0


def _parts(schema: Json) -> list[Json] | None:
    """Return the schemas inside a simple schema; None: the schema is not simple."""
    if isinstance(schema, bool):
        return []
    if not isinstance(schema, dict):
        return None
    parts: list[Json] = []
    for keyword, value in schema.items():
        if keyword in _NOTES or keyword in _VALUES:
            continue
        if keyword in ("items", "additionalProperties"):
            parts.append(value)
        elif keyword == "properties" and isinstance(value, dict):
            parts += value.values()
        elif keyword == "anyOf" and isinstance(value, list) and len(value) <= SIMPLE_OPTIONS:
            parts += value
        else:
            return None
    return parts
