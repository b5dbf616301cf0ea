"""The grammar, in llguidance's dialect of Lark, of answers that are calls of given functions, or begin with
reasoning."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from baton.core.structured_output import FORM
from baton.text.config import Json
from baton.tools.reasoning import CLOSING, OPENING

# The spacing of Python's json, which models have seen most. Free white space would let a model go on for
# ever.
_SPACING: dict[str, Json] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}


@dataclass(frozen=True, slots=True)
class CallSpelling:
    """The way a format writes calls."""

    arguments_key: str
    opening: str = ""
    closing: str = ""
    separator: str = "\n"


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls that an answer may consist of."""

    spelling: CallSpelling
    functions: Mapping[str, Mapping[str, Json]]
    """JSON schemas of the arguments, by function name."""
    several: bool


def grammar_of(calls: Calls | None, *, form: bool, thinks: bool, opened: bool, special: Set[str]) -> str:
    """Return the grammar of answers that are calls, or have a ``form`` that is defined elsewhere, or are
    either.

    With ``thinks``, reasoning may come first; with ``opened`` it must, as the answer begins inside of it.
    ``special`` are the markers that are special tokens: a grammar matches those by name, not as text.
    """
    reasoning = "thinking /[ \\n]{0,4}/ "
    first = reasoning if opened else f"({_terms(OPENING, special)} {reasoning})? " if thinks else ""
    answers = " | ".join([FORM] * form + ["calls"] * (calls is not None))
    lines = [f"start: {first}({answers})"]
    if first:
        lines.append(_thinking(special))
    if calls is not None:
        lines += _call_lines(calls, special)
    return "\n".join(lines) + "\n"


def _call_lines(calls: Calls, special: Set[str]) -> list[str]:
    spelling = calls.spelling
    more = f" ({json.dumps(spelling.separator)} call)*" if calls.several else ""
    around = [_terms(marker, special) for marker in (spelling.opening, spelling.closing)]
    alternatives = " | ".join(f"function_{index}" for index in range(len(calls.functions)))
    lines = [f"calls: call{more}", f"call: {around[0]} ({alternatives}) {around[1]}"]
    for index, (name, schema) in enumerate(calls.functions.items()):
        head = f'{{"name": {json.dumps(name)}, {json.dumps(spelling.arguments_key)}: '
        lines.append(f'function_{index}: {json.dumps(head)} arguments_{index} "}}"')
        lines.append(f"arguments_{index}: %json {json.dumps(_spaced(schema))}")
    return lines


def _thinking(special: Set[str]) -> str:
    if CLOSING in special:
        return f"thinking: /(.|\\n)*/ {CLOSING}"
    return f"thinking[suffix={json.dumps(CLOSING)}]: /(.|\\n)*/"


def _terms(marker: str, special: Set[str]) -> str:
    """Return a marker with the line breaks around it, as terms of the grammar."""
    name = marker.strip()
    if name not in special:
        return json.dumps(marker) if marker else ""
    before, after = marker.split(name)
    return " ".join(filter(None, (before and json.dumps(before), name, after and json.dumps(after))))


def _spaced(schema: Mapping[str, Json]) -> dict[str, Json]:
    """Return ``schema`` for arguments: an object, written with single spaces."""
    return {"type": "object", **schema, "x-guidance": _SPACING}


def functions_of(tools: Sequence[Mapping[str, Json]]) -> dict[str, Mapping[str, Json]]:
    """Return the schemas of the arguments by function name, of tools as templates get them."""
    functions: dict[str, Mapping[str, Json]] = {}
    for tool in tools:
        function = tool["function"]
        assert isinstance(function, dict)
        parameters = function["parameters"]
        assert isinstance(parameters, dict)
        functions[str(function["name"])] = parameters
    return functions
