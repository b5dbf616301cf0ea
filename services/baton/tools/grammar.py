"""A grammar, in llguidance's dialect of Lark, of answers that are calls of given functions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from baton.text.config import Json
from baton.tools.reasoning import CLOSING, OPENING

# As Python's json writes it: what models have seen most. Free white space would let one go on for ever.
_SPACING: dict[str, Json] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}


@dataclass(frozen=True, slots=True)
class CallSpelling:
    """How a format writes calls."""

    arguments_key: str
    opening: str = ""
    closing: str = ""
    separator: str = "\n"


def grammar_of(
    spelling: CallSpelling,
    functions: Mapping[str, Mapping[str, Json]],
    *,
    several: bool,
    thinks: bool,
    opened: bool,
    special: Set[str],
) -> str:
    """The grammar of one call, or of ``several``, of ``functions`` (name → JSON schema of the arguments).

    With ``thinks``, reasoning may come first; with ``opened`` it must, as the answer begins inside of it.
    ``special`` are the markers that are special tokens: a grammar matches those by name, not as text.
    """
    reasoning = "thinking /[ \\n]{0,4}/ "
    first = reasoning if opened else f"({_terms(OPENING, special)} {reasoning})? " if thinks else ""
    more = f" ({json.dumps(spelling.separator)} call)*" if several else ""
    lines = [f"start: {first}call{more}"]
    if first:
        lines.append(_thinking(special))
    around = [_terms(marker, special) for marker in (spelling.opening, spelling.closing)]
    alternatives = " | ".join(f"function_{index}" for index in range(len(functions)))
    lines.append(f"call: {around[0]} ({alternatives}) {around[1]}")
    for index, (name, schema) in enumerate(functions.items()):
        head = f'{{"name": {json.dumps(name)}, {json.dumps(spelling.arguments_key)}: '
        lines.append(f'function_{index}: {json.dumps(head)} arguments_{index} "}}"')
        lines.append(f"arguments_{index}: %json {json.dumps(_spaced(schema))}")
    return "\n".join(lines) + "\n"


def _thinking(special: Set[str]) -> str:
    if CLOSING in special:
        return f"thinking: /(.|\\n)*/ {CLOSING}"
    return f"thinking[suffix={json.dumps(CLOSING)}]: /(.|\\n)*/"


def _terms(marker: str, special: Set[str]) -> str:
    """A marker with the line breaks around it, as terms of the grammar."""
    name = marker.strip()
    if name not in special:
        return json.dumps(marker) if marker else ""
    before, after = marker.split(name)
    return " ".join(filter(None, (before and json.dumps(before), name, after and json.dumps(after))))


def _spaced(schema: Mapping[str, Json]) -> dict[str, Json]:
    """``schema`` for arguments: an object, written with single spaces."""
    return {"type": "object", **schema, "x-guidance": _SPACING}


def functions_of(tools: Sequence[Mapping[str, Json]]) -> dict[str, Mapping[str, Json]]:
    """Name → schema of the arguments, of tools as templates get them."""
    functions: dict[str, Mapping[str, Json]] = {}
    for tool in tools:
        function = tool["function"]
        assert isinstance(function, dict)
        parameters = function["parameters"]
        assert isinstance(parameters, dict)
        functions[str(function["name"])] = parameters
    return functions
