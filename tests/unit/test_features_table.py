"""``docs/features.md`` names tests that there are."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from scripts.phases import OF_ALL

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs/features.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py(?:::[^`]+)?)`", TABLE)))
IN_A_RING = [
    name
    for line in TABLE.splitlines()
    if line.count(" | ") == 3
    for name in re.findall(r"`(tests/[\w/]+\.py(?:::[^`]+)?)`", line.split(" | ")[2])
]
"""The tests of each feature through a ring, over one connector."""
CELL = re.compile(r"`tests/|no ring|likewise|no matter|refused by")


@pytest.mark.parametrize("name", NAMED)
def test_each_test_is_there(name: str) -> None:
    file, *parts = name.partition("[")[0].split("::")
    found: list[ast.stmt] = ast.parse((ROOT / file).read_text()).body
    for part in parts:
        [definition] = [
            d
            for d in found
            if isinstance(d, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and d.name == part
        ]
        found = definition.body


@pytest.mark.parametrize("name", sorted(set(IN_A_RING)))
def test_each_is_shown_through_a_ring_before_every_change(name: str) -> None:
    """By `make test`, and not by `make test-deep` alone."""
    file, *parts = name.partition("[")[0].split("::")
    text = (ROOT / file).read_text()
    assert not re.search(f"{OF_ALL}deep", text)
    if parts:
        above = text[: text.index(f"def {parts[-1]}(")].rpartition("\n\n")[2]
        assert "mark.deep" not in above


def test_each_case_is_there() -> None:
    from tests.e2e.test_features import CASES, METHODS

    cases = set(re.findall(r"test_equals_one_worker\[\w+-([^\]]+)\]", TABLE))
    assert cases == set(CASES)
    assert set(re.findall(r"test_drafts_change_nothing\[\w+-([^\]]+)\]", TABLE)) == set(METHODS)


def test_no_cell_is_empty() -> None:
    rows = [line.strip("|").split("|") for line in TABLE.splitlines() if line.startswith("| ")]
    cells = [cell.strip() for _, *row in rows if row[0].strip() != "one worker" for cell in row]
    assert len(cells) > 100
    assert [cell for cell in cells if not CELL.search(cell)] == []
