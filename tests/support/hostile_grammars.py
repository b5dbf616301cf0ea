"""Grammars that are meant to do harm: to be refused, each within a second, without any harm done."""

from __future__ import annotations

import json
from types import MappingProxyType

from baton.core.structured_output import StructuredOutput


def _nested(depth: int) -> str:
    return '{"type":"array","items":' * depth + "{}" + "}" * depth


def _intersection(patterns: int) -> str:
    return "start: A\nA: " + " & ".join(f"/.*a[ab]{{{i}}}b.*/" for i in range(patterns))


HOSTILE = MappingProxyType(
    {
        # A set of states that doubles with each repetition, 30 times over.
        "exponential regex": StructuredOutput("regex", "(x+x+)+y" + "(a*b?)*" * 9000),
        "intersected expressions": StructuredOutput("grammar", _intersection(30)),
        "intersected patterns": StructuredOutput(
            "json_schema",
            json.dumps(
                {"allOf": [{"type": "string", "pattern": f".*a[ab]{{{i}}}b.*"} for i in range(30)]},
            ),
        ),
        "deep schema": StructuredOutput("json_schema", _nested(2000)),
        "deep rules": StructuredOutput(
            "grammar",
            "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(4500)) + '\nr4500: "a"',
        ),
        "deep parentheses": StructuredOutput("grammar", "root ::= " + "(" * 30000 + '"a"' + ")" * 30000),
        "rules that double": StructuredOutput(
            "grammar", "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(40)) + '\nr40: "a"'
        ),
        "nothing matches": StructuredOutput("grammar", 'start: start "a"'),
        "10 MB schema": StructuredOutput("json_schema", '{"enum":["' + "x" * 10_000_000 + '"]}'),
        "10 MB regex": StructuredOutput("regex", "x" * 10_000_000),
        "wide schema": StructuredOutput(
            "json_schema",
            json.dumps({"type": "object", "properties": {f"p{i}": True for i in range(4000)}}),
        ),
        "empty rules": StructuredOutput("grammar", "start: " + "a " * 20000 + '\na: | "x"'),
    }
)

TRIES = 3
"""A busy machine can delay a refusal: one in time of so many will do."""


def variants(name: str) -> list[StructuredOutput]:
    """A hostile grammar several times over, each another to a cache."""
    output = HOSTILE[name]
    return [StructuredOutput(output.kind, output.text + "\n" * i) for i in range(TRIES)]
