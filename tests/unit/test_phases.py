"""`make test` and `make test-deep`: which phase has which tests, and what is said when some fail."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Collection
from itertools import product
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

from scripts import phases
from scripts.phases import PHASES, ROOT
from tests.conftest import check_marks

FOLDERS = {folder for phase in PHASES for folder in phase.folders}


@pytest.mark.parametrize("folder", sorted(FOLDERS))
def test_every_test_without_a_device_has_one_phase(folder: str) -> None:
    of_folder = ("beside", "program", "") if folder == "e2e" else ("nixl", "")
    for marks in product(("deep", ""), of_folder):
        expressions = [
            phase.expression(deep) for phase in PHASES for deep in (False, True) if folder in phase.folders
        ]
        assert sum(has(expression, marks) for expression in expressions) == 1, marks


def has(expression: str, marks: Collection[str]) -> bool:
    def is_among(mark: str, /, **_: object) -> bool:
        return mark in marks

    return Expression.compile(expression).evaluate(is_among)


def test_every_file_is_in_a_phase() -> None:
    files = {file for phase in PHASES for deep in (False, True) for file in phase.files(ROOT, deep)}
    there = [path for folder in FOLDERS for path in (ROOT / "tests" / folder).glob("test_*.py")]
    assert files == {str(path.relative_to(ROOT)) for path in there}


PASSES = "def test_it(): pass\n"
FAILS = "class TestIt:\n    def test_that(self): assert 0\n"
DEEP = "import pytest\npytestmark = pytest.mark.deep\ndef test_it(): pass\n"
ENDS = "import os\nos.abort()\n"
"""A conftest that ends pytest itself."""
MARKS = "[pytest]\naddopts = -p xdist\nmarkers =\n    deep:\n    gpu:\n    nixl:\n    beside:\n    program:\n"


@pytest.fixture
def _plainest_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)


def ran(root: Path, files: dict[str, str], *arguments: str) -> int:
    for name, text in {"pytest.ini": MARKS, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return phases.main(arguments, root)


@pytest.mark.usefixtures("_plainest_pytest")
def test_a_phase_that_fails_hides_no_other(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    files = {"tests/unit/test_a.py": FAILS, "tests/property/test_b.py": PASSES, "tests/e2e/test_c.py": PASSES}
    assert ran(tmp_path, files) == 1
    said = capfd.readouterr().out
    assert re.search(r"^FAILED  units and properties +\d+ s  1 failed, 1 passed$", said, re.MULTILINE)
    assert re.search(r"^passed  rings +\d+ s  1 passed$", said, re.MULTILINE)
    assert said.endswith("failed in units and properties:\n  tests/unit/test_a.py::TestIt::test_that\n")
    assert ran(tmp_path, files, "-x") == 1
    assert "rings" not in capfd.readouterr().out


@pytest.mark.usefixtures("_plainest_pytest")
def test_a_phase_that_ends_is_no_success(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    files = {"tests/unit/test_a.py": PASSES, "tests/e2e/conftest.py": ENDS, "tests/e2e/test_c.py": PASSES}
    assert ran(tmp_path, files) == 1
    assert capfd.readouterr().out.endswith("failed in rings:\n  pytest was ended by SIGABRT\n")


@pytest.mark.deep
@pytest.mark.usefixtures("_plainest_pytest")
def test_what_is_deep_runs_when_told_to(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    files = {"tests/unit/test_a.py": DEEP, "tests/e2e/test_c.py": PASSES}
    for arguments, counted in ((), ("rings",)), (("--deep",), ("units and properties",)):
        assert ran(tmp_path, files, *arguments) == 0
        said = capfd.readouterr().out
        assert (
            tuple(re.findall(r"^passed  (\w[\w ]*\w) +\d+ s  1 passed$", said, re.MULTILINE)) == counted * 2
        )


@pytest.mark.deep
@pytest.mark.usefixtures("_plainest_pytest")
def test_options_may_leave_nothing_of_a_phase(tmp_path: Path) -> None:
    files = {"tests/unit/test_a.py": PASSES, "tests/e2e/test_c.py": PASSES}
    assert ran(tmp_path, files, "-k", "test_c") == 0


@pytest.mark.deep
def test_only_one_ucx_is_loaded_into_a_process() -> None:
    """Whatever is collected: two of them end it."""
    loading, other = "tests/property/test_nixl_link.py", "tests/unit/test_phases.py"
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", loading, other]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert other in said
    assert loading not in said
    assert re.search(r"/\d+ tests collected \([1-9]\d* deselected\)", said)


def test_marks_that_no_phase_would_find_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "test_hidden.py"
    for text in ("getattr(pytest.mark, hidden)", "deep"):
        path.write_text(text)
        with pytest.raises(pytest.UsageError, match=r"test_hidden\.py has tests marked deep"):
            check_marks({path: {"deep"}})
    path.write_text("pytest.mark.deep")
    check_marks({path: {"deep"}})
