"""``python -m loadtest.gpu --dry-run``: all parts as a GPU would see them, and parts that do not end well."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from loadtest.gpu.parts.versions import PROGRAMS
from loadtest.gpu.plan import PARTS
from loadtest.gpu.report import report
from loadtest.gpu.results import FAILED, KILLED, OK, SKIPPED, TIMEOUT, PartRun, read
from tests.support import warm

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.beside, pytest.mark.deep]

TABLES = {
    "versions": {"Versions": 6, "Imports": len({part.module for part in PARTS}) + len(PROGRAMS)},
    "builds": {"Kernels built": 1, "The build": 1},
    "kernel-tests": {"Tests": 1},
    "decode": {"The device at best": 1, "Decode step": 8},
    "prompt": {"The device at best": 1, "Prompt": 1, "Mixed step": 1},
    "attention": {"Attention of one layer": 3},
    "correctness": {"Log-probabilities in bfloat16": 2, "Answers in bfloat16": 4},
    "sanitizer": {},
    "cuda-tests": {"Tests": 1},
    "serve": {"Served": 2},
    "handoff-tcp": {"Both engines idle": 2, "Bytes": 1, "The receiver decodes": 1, "Both engines busy": 1},
    "disturbance": {"Gaps between tokens": 6},
    "speculative": {"Steps with drafts": 4},
    "host-tier": {"Copies between host and device": 1, "Prompts through the host tier": 2},
    "long-context": {"One long prompt": 1, "Steps behind it": 1},
    "handoff-nccl": {"Both engines idle": 2, "Bytes": 1, "The receiver decodes": 1, "Both engines busy": 1},
}
"""The rows of each table that a dry run has on any machine."""
NEEDS = {"sanitizer": "compute-sanitizer", "handoff-ucx": "ucxx", "handoff-nixl": "nixl"}
"""Parts that are skipped where something is missing, which the reason names."""


def start(folder: Path, *options: str) -> subprocess.Popen[bytes]:
    environment = {k: v for k, v in os.environ.items() if k not in (warm.ADDRESS, "TRITON_CACHE_DIR")}
    argv = [sys.executable, "-m", "loadtest.gpu", "--dry-run", "--output", str(folder), *options]
    return subprocess.Popen(argv, cwd=ROOT, env=environment)


def counts(run: PartRun) -> dict[str, int]:
    return {title: len(rows) for title, rows in run.tables().items()}


def test_a_dry_run_goes_through_every_part(tmp_path: Path) -> None:
    assert start(tmp_path).wait(1100) == 0
    found = read(tmp_path)
    assert sorted(found.parts) == sorted(part.name for part in PARTS)
    ended = {name: run.status for name, run in found.parts.items()}
    allowed = {part.name: {OK, SKIPPED} if part.name in NEEDS else {OK} for part in PARTS}
    assert [name for name, status in ended.items() if status not in allowed[name]] == []
    for name, needed in NEEDS.items():
        assert found.parts[name].status == OK or needed in found.parts[name].reason
    whole = {name: counts(found.parts[name]) for name in TABLES if ended[name] == OK}
    assert whole == {name: TABLES[name] for name in whole}
    assert all(row["works"] for row in found.rows("versions", "Imports"))
    assert all(row["right"] for row in found.rows("handoff-tcp", "Bytes"))
    assert [row["rows"] for row in found.rows("quantized", "Steps of models with experts")] == [1, 3]
    assert {row["skipped"] for row in found.rows("cuda-tests", "Tests")} != {0}
    assert len(list(tmp_path.glob("trace-*.json.gz"))) == 3
    page = report(found)
    assert "Nothing was measured" in page
    for name in TABLES:
        assert f"| {name} | {ended[name]} |" in page


def test_parts_that_end_badly_cost_only_themselves(tmp_path: Path) -> None:
    """One raises, one hangs, and one is killed by hand with a process of its own running."""
    command = start(tmp_path, "--only", "handoff-tcp,rehearsal-raises,rehearsal-sleeps,prompt")
    group = pid_of(tmp_path, "handoff-tcp")
    wait_until(lambda: len(members(group)) > 1, "the sender has started")
    os.kill(group, signal.SIGKILL)
    assert command.wait(480) == 1
    assert members(group) == []
    found = read(tmp_path)
    ends = {name: (run.status, run.reason) for name, run in found.parts.items()}
    assert ends == {
        "handoff-tcp": (KILLED, "ended by SIGKILL"),
        "rehearsal-raises": (FAILED, "RuntimeError: this part raises on purpose"),
        "rehearsal-sleeps": (TIMEOUT, "its limit of 12 s was over"),
        "prompt": (OK, ""),
    }
    assert counts(found.parts["prompt"]) == TABLES["prompt"]
    assert counts(found.parts["rehearsal-raises"]) == {"Rehearsal": 1}
    assert "rehearsals.py" in (tmp_path / "parts.rehearsal-sleeps.log").read_text(), "no stacks"
    ran = subprocess.run(
        [sys.executable, "-m", "loadtest.gpu", "report", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0
    assert "| handoff-tcp | killed |" in ran.stdout
    assert "(handoff-tcp: killed, ended by SIGKILL)" in ran.stdout
    assert "## Prompt (prompt)" in ran.stdout


def pid_of(folder: Path, part: str) -> int:
    """The process of a part, once it has begun."""
    found: list[int] = []

    def begun() -> bool:
        lines = [line for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
        for record in map(json.loads, lines):
            if (record["part"], record["record"]) == (part, "begin"):
                found.append(record["pid"])
        return bool(found)

    wait_until(begun, f"{part} has begun")
    return found[0]


def members(group: int) -> list[int]:
    """The processes of a group that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            _, _, rest = stat.read_text().rpartition(") ")
        except OSError:
            continue
        state, _, pgrp = rest.split()[:3]
        if int(pgrp) == group and state not in "ZX":
            found.append(int(stat.parent.name))
    return found


def wait_until(true: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, f"not after {seconds} s: {what}"
        time.sleep(0.05)
