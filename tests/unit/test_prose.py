"""Docstrings stand alone: each begins with its subject or an imperative, not in the middle of a sentence."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FRAGMENT = re.compile(
    r"(Those|These|Of|Whose|Which|Whom|Than|That which|This one|One of them|All of|Both|Among|"
    r"Likewise|The same|Its?|They|Their|There|Here|Since|Until|When|Where|While|If|Because|So|"
    r"And|Or|But|As|In|At|By|For|From|To|With|Beside|Between|Behind|Before|After|Each has|"
    r"Seconds|Bytes)\b"
)
"""How a docstring begins that leans on the line above it."""


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every string that stands as a statement: of modules, classes, functions, fields and constants."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text


@pytest.mark.parametrize("folder", ["services/baton", "kernels/baton_kernels", "loadtest"])
def test_docstrings_stand_alone(folder: str) -> None:
    leaning = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path.parent.name != "v1"  # generated
        for line, text in docstrings(ast.parse(path.read_text(encoding="utf-8")))
        if FRAGMENT.match(text)
    ]
    assert not leaning, "\n".join(leaning)
