"""``docs/models.md`` has a row for each architecture that is served, and for each that is refused by name."""

from __future__ import annotations

import re
from pathlib import Path

from baton.models.registry import FAMILIES, UNSERVED

PAGE = (Path(__file__).parents[2] / "docs/models.md").read_text()
ROWS = {
    name: [cell.strip() for cell in rest.split("|")]
    for name, rest in re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE, re.MULTILINE)
}


def test_each_architecture_has_its_row() -> None:
    assert set(ROWS) == {*FAMILIES, *UNSERVED}
    assert f"[{len(FAMILIES)} architectures]" in (Path(__file__).parents[2] / "docs/serving.md").read_text()


def test_rows_are_true() -> None:
    for name, family in FAMILIES.items():
        checkpoints, _, *tested = ROWS[name]
        assert tuple(re.findall(r"`([^`]+)`", checkpoints)) == family.checkpoints
        assert len(tested) == 4 and {*tested} <= {"CI", "full"}
    assert {name: ROWS[name] for name in UNSERVED} == {name: [why] for name, why in UNSERVED.items()}
