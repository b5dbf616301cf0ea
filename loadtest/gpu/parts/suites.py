"""The project's tests that need a device, by pytest, and a few kernels under NVIDIA's sanitizer."""

from __future__ import annotations

import importlib.util
import re
import shutil
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

from loadtest.gpu.bench import Bench
from loadtest.gpu.results import SkipPartError

ROOT = Path(__file__).parents[3]
SPARE_S = 12.0
"""The seconds before the part's limit at which pytest is interrupted."""


@dataclass(frozen=True)
class Suite:
    """Tests to run, and over how many processes."""

    tests: tuple[str, ...]
    processes: int
    prefix: tuple[str, ...] = ()


SUITES = {
    "kernels": Suite(("tests/gpu/test_kernels.py",), 8),
    "cuda": Suite(("tests/gpu/test_cuda.py",), 4),
    "sanitizer": Suite(
        (
            "tests/gpu/test_kernels.py::test_attention[3]",
            "tests/gpu/test_kernels.py::test_draws[320]",
            "tests/gpu/test_kernels.py::test_blocks_to_and_from_pinned_memory[True]",
        ),
        0,
        ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9"),
    ),
}


def measure(bench: Bench, which: str) -> None:
    """Run a suite. The part fails if a test does."""
    suite = SUITES[which]
    if importlib.util.find_spec("pytest") is None:
        raise SkipPartError("pytest is not installed")
    if suite.prefix and shutil.which(suite.prefix[0]) is None:
        raise SkipPartError(f"{suite.prefix[0]} is not on the PATH")
    written = bench.tmp / "tests.xml"
    command = [*suite.prefix, sys.executable, "-m", "pytest", "-v", "-m", "gpu", *suite.tests]
    command += ["-p", "no:cacheprovider", "-o", "junit_family=xunit2", f"--junitxml={written}"]
    if suite.processes and not bench.dry and importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(suite.processes)]
    status = run(command, bench.left - SPARE_S)
    if not written.exists():
        raise RuntimeError(f"pytest ended with {status} and without results")
    failed = record(bench, written)
    if status not in (0, 1, 5) or failed:
        raise RuntimeError(f"pytest ended with {status}; failed: {', '.join(failed) or 'none'}")


def run(command: list[str], seconds: float) -> int:
    """Return the command's exit status. It is interrupted when its time is over, so that it writes what it
    has."""
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    try:
        return process.wait(SPARE_S / 2)
    except subprocess.TimeoutExpired:
        raise RuntimeError("the tests did not end in time") from None


def record(bench: Bench, written: Path) -> list[str]:
    """Write the counts, each failure and the reasons of skipped tests; return the names of failures."""
    root = ElementTree.parse(written).getroot()
    names = ("tests", "failures", "errors", "skipped")
    total = {name: sum(int(suite.get(name, 0)) for suite in root.iter("testsuite")) for name in names}
    failed = total["failures"] + total["errors"]
    passed = total["tests"] - failed - total["skipped"]
    bench.results.row("Tests", passed=passed, failed=failed, skipped=total["skipped"])
    broken, reasons = list[str](), dict[str, int]()
    for case in root.iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        for kind in ("failure", "error"):
            for problem in case.findall(kind):
                broken.append(name)
                bench.results.missing(name, (problem.get("message") or kind)[:300])
        for skip in case.findall("skipped"):
            reason = re.sub(r"^Skipped: ", "", skip.get("message") or "no reason")
            reasons[reason] = reasons.get(reason, 0) + 1
    for reason, count in reasons.items():
        bench.results.missing(f"{count} tests", reason)
    return broken
