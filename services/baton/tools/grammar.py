"""The grammar, in llguidance's dialect of Lark, of answers that are calls of given functions, or begin with
reasoning."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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


_NO_ARGUMENTS: dict[str, Json] = {"properties": {}, "additionalProperties": False}
"""The schema of the arguments of a function that has none."""


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


def grammar_of(
    calls: Calls | None, *, form: bool, thinks: bool, opened: bool, tokens: Mapping[str, int]
) -> str:
    """Return the grammar of answers that are calls, or have a ``form`` that is defined elsewhere, or are
    either.

    With ``thinks``, reasoning may come first; with ``opened`` it must, as the answer begins inside of it.
    ``tokens`` are the markers that are single tokens, with their ids, by which the grammar names them.
    """
    reasoning = "thinking /[ \\n]{0,4}/ "
    first = reasoning if opened else f"({_terms(OPENING, tokens)} {reasoning})? " if thinks else ""
    answers = " | ".join([FORM] * form + ["calls"] * (calls is not None))
    lines = [f"start: {first}({answers})"]
    if first:
        lines += _thinking(tokens)
    if calls is not None:
        lines += _call_lines(calls, tokens)
    return "\n".join(lines) + "\n"


def _call_lines(calls: Calls, tokens: Mapping[str, int]) -> list[str]:
    spelling = calls.spelling
    more = f" ({json.dumps(spelling.separator)} call)*" if calls.several else ""
    around = [_terms(marker, tokens) for marker in (spelling.opening, spelling.closing)]
    alternatives = " | ".join(f"function_{index}" for index in range(len(calls.functions)))
    lines = [f"calls: call{more}", f"call: {around[0]} ({alternatives}) {around[1]}"]
    for index, (name, schema) in enumerate(calls.functions.items()):
        head = f'{{"name": {json.dumps(name)}, {json.dumps(spelling.arguments_key)}: '
        lines.append(f'function_{index}: {json.dumps(head)} arguments_{index} "}}"')
        lines.append(f"arguments_{index}: %json {json.dumps(_spaced(schema))}")
    return lines


def _thinking(tokens: Mapping[str, int]) -> list[str]:
    if CLOSING not in tokens:
        return [f"thinking[suffix={json.dumps(CLOSING)}]: /(.|\\n)*/"]
    # Spelled in letters, the marker would end the reasoning for the parser, but not for the grammar.
    spelled = CLOSING.replace("/", "\\/")
    return [
        f"thinking: THOUGHT {_token(tokens[CLOSING])}",
        f"THOUGHT: /(.|\\n)*/ & ~/(.|\\n)*{spelled}(.|\\n)*/",
    ]


def _terms(marker: str, tokens: Mapping[str, int]) -> str:
    """Return a marker with the line breaks around it, as terms of the grammar."""
    name = marker.strip()
    if name not in tokens:
        return json.dumps(marker) if marker else ""
    before, after = marker.split(name)
    return " ".join(
        filter(None, (before and json.dumps(before), _token(tokens[name]), after and json.dumps(after)))
    )


def _token(token_id: int) -> str:
    return f"<[{token_id}]>"


def _spaced(schema: Mapping[str, Json]) -> dict[str, Json]:
    """Return ``schema`` for arguments: an object, written with single spaces."""
    return {"type": "object", **schema, "x-guidance": _SPACING}


def functions_of(tools: Sequence[Mapping[str, Json]]) -> dict[str, Mapping[str, Json]]:
    """Return the schemas of the arguments by function name, of tools as templates get them."""
    functions: dict[str, Mapping[str, Json]] = {}
    for tool in tools:
        function = tool["function"]
        assert isinstance(function, dict)
        parameters = function.get("parameters")
        assert parameters is None or isinstance(parameters, dict)
        functions[str(function["name"])] = parameters or _NO_ARGUMENTS
    return functions
