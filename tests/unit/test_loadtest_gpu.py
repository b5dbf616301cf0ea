"""``python -m loadtest.gpu``: what it refuses, its plan, its files, and the report written from them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from loadtest.gpu import results, running
from loadtest.gpu.__main__ import main
from loadtest.gpu.plan import BY_NAME, CALL_SECONDS, PARTS, of_call
from loadtest.gpu.report import report
from loadtest.gpu.results import Results, Value, read
from loadtest.gpu.running import Call, keep_cache, run, unpack_cache
from loadtest.gpu.targets import DECODE, TARGETS

ROOT = Path(__file__).parents[2]
Rows = list[dict[str, Value]]


@pytest.mark.deep
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_it_refuses_without_a_device(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"NOTHING MEASURED\. It needs a CUDA device"):
        main(["--output", str(tmp_path / "results")])
    assert not (tmp_path / "results").exists()


def test_it_refuses_parts_that_it_does_not_have(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--dry-run", "--only", "decode,nothing"])
    assert "--only names nothing; allowed: versions, builds" in capsys.readouterr().err


def test_the_parent_needs_nothing_but_python(tmp_path: Path) -> None:
    """The parent, and the report on another machine: isolated, without any package."""
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); sys.argv[1:] = ['report', sys.argv[2]]\n"
        "import loadtest.gpu.__main__ as command; command.main()\n"
        "assert 'torch' not in sys.modules and 'rich' not in sys.modules"
    )
    write(tmp_path, "decode", [step(1, 0.9)])
    argv = [sys.executable, "-I", "-S", "-c", program, str(ROOT), str(tmp_path)]
    ran = subprocess.run(argv, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "## Targets" in ran.stdout


def test_both_calls_begin_with_versions_and_nccl_is_last() -> None:
    one, two = of_call(1), of_call(2)
    assert one[0] == two[0] == BY_NAME["versions"]
    assert two[-1].name == "handoff-nccl"
    assert {part.name for part in (*one, *two)} == {part.name for part in PARTS}
    assert CALL_SECONDS < 540


def step(rows: int, share: float, replayed: float = 10.0) -> dict[str, Value]:
    return {
        "table": "Decode step",
        "rows": rows,
        "context": 1024,
        "sampling": "greedy",
        "replayed, ms": replayed,
        "of a copy": share,
    }


def write(folder: Path, part: str, rows: Rows, status: str = "ok", reason: str = "") -> None:
    written = Results(folder / "call-1.jsonl", part)
    written.write("begin", {"pid": 1})
    for row in rows:
        written.write("row", row)
    written.write("end", {"status": status, "reason": reason, "seconds": 1.0})


def verdicts(folder: Path) -> Mapping[str, str]:
    page = report(read(folder))
    rows = page[page.index("## Targets") : page.index("## Parts")].splitlines()[4:]
    return {
        row.split(" | ")[0].removeprefix("| "): row.split(" | ")[-1].removesuffix(" |") for row in rows if row
    }


def test_the_report_judges_every_target(tmp_path: Path) -> None:
    write(tmp_path, "decode", [step(1, 0.81), step(16, 0.79, 20.0)])
    engine: Rows = [
        {"table": "Engine steps", "rows": rows, "sampling": "greedy", "p50, ms": p50}
        for rows, p50 in ((1, 10.3), (16, 21.0))
    ]
    write(tmp_path, "offline", engine)
    write(tmp_path, "cuda-tests", [{"table": "Tests", "passed": 0, "failed": 0, "skipped": 9}])
    write(tmp_path, "kernel-tests", [{"table": "Tests", "passed": 9, "failed": 1, "skipped": 0}])
    write(tmp_path, "prompt", [], "timeout", "its limit of 60 s was over")
    found = verdicts(tmp_path)
    assert len(found) == len(TARGETS)
    assert found["decode step of 1 x 1,024: share of a copy's rate"] == "reached"
    assert found["decode step of 16 x 1,024: share of a copy's rate"] == "missed"
    assert found["engine step at 1 rows: longer than forward pass and draw by"] == "reached"
    assert found["engine step at 16 rows: longer than forward pass and draw by"] == "missed"
    assert (
        found["decode step of 64 x 1,024: share of a copy's rate"] == "not measured (decode has no such row)"
    )
    assert found["tests on the device that failed"] == "missed"
    assert found["tests of the ring on the device that failed"].startswith("not measured")
    late = "not measured (prompt: timeout, its limit of 60 s was over)"
    assert found["prompt of 8,192: share of a matmul's rate"] == late
    assert DECODE == {1: 0.80, 16: 0.80, 64: 0.80, 256: 0.75}


def test_the_last_run_of_a_part_counts_and_a_torn_line_does_not(tmp_path: Path) -> None:
    write(tmp_path, "decode", [step(1, 0.5)])
    time.sleep(0.002)
    write(tmp_path, "decode", [step(1, 0.9)])
    time.sleep(0.002)
    Results(tmp_path / "call-2.jsonl", "serve").write("begin", {"pid": 1})
    with (tmp_path / "call-2.jsonl").open("a") as file:
        file.write('{"part": "serve", "record": "row", "tab')
    found = read(tmp_path)
    assert [row["of a copy"] for row in found.rows("decode", "Decode step")] == [0.9]
    assert found.parts["serve"].status == results.KILLED
    assert "the whole run ended before it did" in report(found)


def call(tmp_path: Path, names: str, seconds: float = 60.0) -> Call:
    parts = [BY_NAME[name] for name in names.split(",")]
    (tmp_path / "tmp").mkdir()
    return Call("parts", parts, tmp_path, tmp_path / "tmp", True, seconds)


def test_parts_that_a_call_has_no_time_for_do_not_run(tmp_path: Path) -> None:
    [outcome] = run(call(tmp_path, "decode", seconds=3.0))
    assert outcome.status == results.NOT_RUN
    assert read(tmp_path).parts["decode"].reason == "the call's 3 s were used up"


def test_what_a_part_started_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that ends well and leaves a process behind."""
    program = "import subprocess, sys; print(subprocess.Popen(['sleep', '1000']).pid, flush=True)"
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{program}"\n')
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    [outcome] = run(call(tmp_path, "decode"))
    assert outcome.status == results.OK
    pid = (tmp_path / "parts.log").read_text().split()[-1]
    for _ in range(500):
        if not Path(f"/proc/{pid}/cmdline").exists() or not Path(f"/proc/{pid}/cmdline").read_bytes():
            break
        time.sleep(0.01)
    else:
        raise AssertionError(f"process {pid} is still there")


def test_built_kernels_travel_from_call_to_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    one = call(tmp_path, "decode")
    (running.cache_folder(one.tmp) / "ABC").mkdir(parents=True)
    (running.cache_folder(one.tmp) / "ABC" / "kernel.cubin").write_bytes(b"built")
    keep_cache(one)
    with tarfile.open(tmp_path / running.CACHE) as packed:
        assert "./ABC/kernel.cubin" in packed.getnames()
    unpack_cache(tmp_path / running.CACHE, tmp_path / "other")
    assert (tmp_path / "other" / "triton-cache" / "ABC" / "kernel.cubin").read_bytes() == b"built"


def test_a_signal_ends_the_parts(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "loadtest.gpu", "--dry-run", "--output", str(tmp_path)]
    command = subprocess.Popen([*argv, "--only", "correctness,decode,prompt"], cwd=ROOT)
    pids: list[int] = []
    while len(pids) < 2:
        time.sleep(0.02)
        pids = [int(record["pid"]) for record in records(tmp_path) if record["record"] == "begin"]
    command.send_signal(signal.SIGTERM)
    assert command.wait(120) == 128 + signal.SIGTERM
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []


def records(folder: Path) -> list[dict[str, int | str]]:
    lines = [line for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
    return [json.loads(line) for line in lines]
