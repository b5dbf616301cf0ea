"""Thirty grammars, each with a check of its texts that knows nothing of grammars."""

from __future__ import annotations

import ast
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class GrammarCase:
    name: str
    text: str
    is_valid: Callable[[str], bool]


def csv_grammar(columns: int, rows: int) -> str:
    """A header and up to ``rows`` lines of ``columns`` fields, in quotes where they need them (RFC 4180)."""
    line = ' "," '.join(["field"] * columns)
    return f"""
root   ::= header line{{1,{rows}}}
header ::= {' "," '.join(["name"] * columns)} "\\n"
name   ::= [a-z]{{1,8}}
line   ::= {line} "\\n"
field  ::= bare | quoted
bare   ::= [a-zA-Z0-9 .-]{{0,10}}
quoted ::= "\\"" ( [a-z ,\\n] | "\\"\\"" ){{0,8}} "\\""
"""


def parse_csv(text: str) -> list[list[str]]:
    """Rows of fields; ValueError if the text is not CSV."""
    rows, row, field, at = [], list[str](), "", 0
    while at < len(text):
        if text[at] == '"' and not field:
            end = at + 1
            while text[end : end + 2] == '""' or text[end : end + 1] not in ('"', ""):
                step = 2 if text[end] == '"' else 1
                field += text[end]
                end += step
            if text[end : end + 1] != '"' or text[end + 1 : end + 2] not in (",", "\n"):
                raise ValueError(f"quote at {at} is not closed before a comma or an end of line")
            at = end + 1
        elif text[at] in ",\n":
            row.append(field)
            field = ""
            if text[at] == "\n":
                rows.append(row)
                row = []
            at += 1
        elif text[at] == '"':
            raise ValueError(f"a quote within a field at {at}")
        else:
            field += text[at]
            at += 1
    if row or field:
        raise ValueError("the last line has no end")
    return rows


def is_csv(columns: int) -> Callable[[str], bool]:
    def check(text: str) -> bool:
        rows = parse_csv(text)
        return len(rows) > 1 and all(len(row) == columns for row in rows)

    return check


def xml_grammar(tags: str, depth: int) -> str:
    """Elements of the names ``tags``, nested up to ``depth`` deep, each closed by its own name."""
    lines = [f"start: e{depth}"]
    for level in range(depth, 0, -1):
        inside = f"(TEXT | e{level - 1}){{0,3}}" if level > 1 else "TEXT?"
        options = " | ".join(f'"<{t}" attribute? ">" {inside} "</{t}>"' for t in tags)
        lines.append(f"e{level}: {options}")
    lines += ['attribute: " id=\\"" /[0-9]{1,4}/ "\\""', "TEXT: /[a-z ]{1,10}|&amp;|&lt;/"]
    return "\n".join(lines)


def is_xml(tags: str, depth: int) -> Callable[[str], bool]:
    def check(text: str) -> bool:
        root = ET.fromstring(text)
        return {element.tag for element in root.iter()} <= set(tags) and _depth(root) <= depth

    return check


def _depth(element: ET.Element) -> int:
    return 1 + max(map(_depth, element), default=0)


def is_match(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


def is_sum(text: str) -> bool:
    return isinstance(ast.parse(text, mode="eval").body, ast.BinOp | ast.Constant)


def is_balanced(text: str) -> bool:
    while text != (text := text.replace("()", "").replace("[]", "")):
        pass
    return not text


def is_json_line(text: str) -> bool:
    return text.endswith("\n") and set(json.loads(text)) == {"id", "ok"}


def _others() -> Iterator[GrammarCase]:
    yield GrammarCase(
        "sum", 'root ::= term ("+" term){0,5}\nterm ::= "(" root ")" | [1-9] [0-9]{0,2}', is_sum
    )
    yield GrammarCase(
        "balanced", 'start: ("()" | "[]" | "(" inner ")"){1,4}\ninner: ("[]" | "()"){0,3}', is_balanced
    )
    yield GrammarCase("date", 'start: /[0-9]{4}/ "-" /0[1-9]|1[0-2]/', is_match(r"\d{4}-(0[1-9]|1[0-2])"))
    yield GrammarCase("time", 'root ::= [0-1] [0-9] ":" [0-5] [0-9]', is_match(r"[01]\d:[0-5]\d"))
    yield GrammarCase("hex", 'start: "#" /[0-9a-f]{6}/', is_match("#[0-9a-f]{6}"))
    yield GrammarCase("mail", 'start: /[a-z]{1,8}/ "@" /[a-z]{1,8}/ ".org"', is_match("[a-z]+@[a-z]+[.]org"))
    yield GrammarCase(
        "address", 'root ::= byte "." byte\nbyte ::= [0-9] | [1-9] [0-9]', is_match(r"\d{1,2}\.\d{1,2}")
    )
    yield GrammarCase(
        "json line",
        'start: %json {"type": "object", "properties": {"id": {"type": "integer", "minimum": 0}, '
        '"ok": {"type": "boolean"}}, "required": ["id", "ok"], "additionalProperties": false} "\\n"',
        is_json_line,
    )
    yield GrammarCase("list", 'start: ("- " /[a-z ]{1,12}/ "\\n"){1,4}', is_match("(- [a-z ]{1,12}\n){1,4}"))
    yield GrammarCase("unicode", 'start: ("é" | "東" | "🙂"){1,6}', is_match("[é東🙂]{1,6}"))


CASES = (
    *(GrammarCase(f"csv {n}", csv_grammar(n, 1 + n % 3), is_csv(n)) for n in range(1, 11)),
    *(
        GrammarCase(
            f"xml {n}",
            xml_grammar("abcdefghij"[: 1 + n], 1 + n % 4),
            is_xml("abcdefghij"[: 1 + n], 1 + n % 4),
        )
        for n in range(10)
    ),
    *_others(),
)
