"""A grammar, in llguidance's dialect of Lark, of answers that are calls of given functions, or begin with
reasoning."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from baton.structured_output import FORM
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


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls that an answer may be."""

    spelling: CallSpelling
    functions: Mapping[str, Mapping[str, Json]]
    """Name → JSON schema of the arguments."""
    several: bool


def grammar_of(calls: Calls | None, *, form: bool, thinks: bool, opened: bool, special: Set[str]) -> str:
    """The grammar of answers that are calls, or have a ``form``, which is asked for elsewhere, or are either.

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
