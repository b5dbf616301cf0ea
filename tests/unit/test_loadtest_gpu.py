"""``python -m loadtest.gpu``: its dry run goes through all that a GPU would, and without one it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from loadtest.gpu.__main__ import main

ROOT = Path(__file__).parents[2]


def test_a_dry_run_fills_every_table(tmp_path: Path) -> None:
    written = tmp_path / "gpu.md"
    command = [sys.executable, "-m", "loadtest.gpu", "--dry-run", "--output", str(written)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr
    report = written.read_text()
    assert "Nothing was measured" in report
    assert "FAILED" not in report
    sections = {part.splitlines()[0]: part.splitlines() for part in report.split("\n## ")[1:]}
    rows = {title: sum(line.startswith("|") for line in lines) - 2 for title, lines in sections.items()}
    assert rows == {
        "The device at best": 1,
        "Decode step": 8,
        "Prompt": 1,
        "Attention of one layer": 2,
        "KV handoff between two processes on the device": 2,
        "Served, 8 tokens in, 4 out": 2,
    }
    for lines in sections.values():
        cells = {len(line.split("|")) for line in lines if line.startswith("|")}
        assert len(cells) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_it_refuses_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["loadtest.gpu"])
    with pytest.raises(SystemExit, match=r"NOTHING MEASURED\. It needs a CUDA device"):
        main()


def test_it_refuses_parts_that_it_does_not_have(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["loadtest.gpu", "--dry-run", "--only", "step,nothing"])
    with pytest.raises(SystemExit):
        main()
    assert "allowed: step, attention, handoff, serve" in capsys.readouterr().err
