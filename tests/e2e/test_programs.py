"""Every program that a page tells a reader to run does run, given little to do."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.doc_commands import ROOT
from tests.support.tiny_runs import NO_INDEX, RUNS

pytestmark = [pytest.mark.program, pytest.mark.deep]

NOT_SOURCE = shutil.ignore_patterns(".*", "build", "dist", "__pycache__")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources, where programs may write."""
    return shutil.copytree(ROOT, tmp_path_factory.mktemp("programs") / "tree", ignore=NOT_SOURCE)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("program", RUNS)
def test_it_runs(program: str, tree: Path, tmp_path: Path) -> None:
    tiny = RUNS[program]
    typed = shlex.split(tiny.arguments.format(scratch=tmp_path, tree=tree))
    path = os.pathsep.join(str(tree / folder) for folder in ("services", "kernels"))
    ended = subprocess.run(
        [sys.executable, "-m", program, *typed],
        cwd=tree,
        env=os.environ | NO_INDEX | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    said = ended.stdout + ended.stderr
    allowed = (0, 1) if tiny.judges else (1, 2) if tiny.lacks else (0,)
    assert ended.returncode in allowed, said
    assert re.search(tiny.says, said), said
    assert "Traceback" not in said, said
