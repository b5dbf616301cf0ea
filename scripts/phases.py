"""Run the tests in phases, each in processes of its own, and say at the end what failed.

    python -m scripts.phases [--deep] [PYTEST OPTION ...]

Without ``--deep`` it runs the tests that anyone runs before a change, with it those that are marked ``deep``;
together they are all that need no GPU. A phase that fails does not keep the next from running, unless ``-x``
says so. The exit status is 0 if no phase failed. Results stay in ``build/tests``, as JUnit's XML.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOME_FAILED, INTERRUPTED, NONE_FOUND = 1, 2, 5
"""Pytest's statuses."""
FILES_OF_MARKS = {
    "deep": r"mark\.(deep|both_loops)|support\.deep|\"launched\"",
    "nixl": "nixl",
    "beside": r"mark\.beside",
    "program": r"mark\.program",
}
"""Mark → a pattern that files have in which there are tests with it."""
OF_ALL = r"(?m)^pytestmark\b.*(\n .*)*?mark\."
"""The beginning of a pattern that files have all of whose tests have a mark."""
LONG = r"mark\.timeout\(\d{4,}\)"
"""A pattern of files with a test that takes many minutes: nothing should be left to wait for it alone."""
NOWHERE = r"(?!)"


@dataclass(frozen=True)
class Phase:
    """Tests that share processes."""

    name: str
    marks: str
    """The tests of this phase, as pytest's ``-m`` takes them."""
    folders: tuple[str, ...]
    processes: int
    has: str = ""
    """A pattern of files: one without it has no test of this phase."""
    has_not: str = NOWHERE
    """A pattern of files: one with it has no test of this phase."""
    distribution: tuple[str, ...] = ("loadfile", "--no-loadscope-reorder")
    """How its processes share the tests, as xdist's ``--dist`` takes it, and what that takes besides."""

    def expression(self, deep: bool) -> str:
        return f"{self.marks} and {'deep' if deep else 'not deep'}"

    def files(self, root: Path, deep: bool) -> list[str]:
        """Return the files that have tests of this phase, in the order in which they are begun: each of its
        processes reads all of them."""
        wanted = (self.has, FILES_OF_MARKS["deep"]) if deep else (self.has,)
        unwanted = (self.has_not,) if deep else (self.has_not, f"{OF_ALL}deep")
        paths = [
            path for folder in self.folders for path in sorted((root / "tests" / folder).glob("test_*.py"))
        ]
        texts = {str(path.relative_to(root)): path.read_text() for path in paths}
        found = [
            file
            for file, text in texts.items()
            if all(re.search(pattern, text) for pattern in wanted)
            and not any(re.search(pattern, text) for pattern in unwanted)
        ]
        return sorted(found, key=lambda file: re.search(LONG, texts[file]) is None)


# NIXL and the connector ucx each load a UCX of their own, which end a process that has both: tests that load
# NIXL run by themselves. Rings in which it matters when things happen share the machine with one other, those
# that only ask what is answered with two. In their own order files that are few tests, and long, do not come
# last. A file goes to one process, which makes once what its tests share; programs share nothing, and any
# process takes the next.
PHASES = (
    Phase("units and properties", "not gpu and not nixl", ("property", "unit"), 3),
    Phase("what loads NIXL", "nixl", ("property", "unit"), 3, has=FILES_OF_MARKS["nixl"]),
    Phase("rings beside others", "beside and not gpu", ("e2e",), 3, has=FILES_OF_MARKS["beside"]),
    Phase(
        "programs",
        "program and not gpu",
        ("e2e",),
        3,
        has=FILES_OF_MARKS["program"],
        distribution=("load", "--maxschedchunk", "1"),
    ),
    Phase(
        "rings", "not gpu and not beside and not program", ("e2e",), 2, has_not=f"{OF_ALL}(beside|program)"
    ),
)


@dataclass(frozen=True)
class Outcome:
    """How a phase ended. ``failed``: the names of its tests that failed."""

    phase: str
    status: int
    seconds: float
    counts: Counter[str]
    failed: tuple[str, ...]

    def __str__(self) -> str:
        how = "FAILED" if self.status else "passed"
        counts = ", ".join(f"{number:,} {kind}" for kind, number in sorted(self.counts.items()))
        return f"{how}  {self.phase:22}{self.seconds:6.0f} s  {counts or 'no tests'}"


def main(arguments: Sequence[str], root: Path = ROOT) -> int:
    deep = "--deep" in arguments
    chosen = [argument for argument in arguments if argument != "--deep"]
    outcomes: list[Outcome] = []
    for phase in PHASES:
        files = phase.files(root, deep)
        if not files:
            continue
        outcome = run(phase, files, root, deep, chosen)
        outcomes.append(outcome)
        print(f"{outcome}\n", flush=True)
        if outcome.status == INTERRUPTED or (outcome.status and {"-x", "--exitfirst"} & set(chosen)):
            break
    print(report(outcomes))
    return SOME_FAILED if any(outcome.status for outcome in outcomes) else 0


def run(phase: Phase, files: Sequence[str], root: Path, deep: bool, chosen: Sequence[str]) -> Outcome:
    """Run the tests of a phase in its ``files`` with pytest's options ``chosen``, which may leave none."""
    results = root / "build" / "tests" / f"{'deep-' if deep else ''}{phase.name.replace(' ', '-')}.xml"
    results.parent.mkdir(parents=True, exist_ok=True)
    results.unlink(missing_ok=True)
    began = time.monotonic()
    print(f"== {phase.name}", flush=True)
    typed = [*command(phase, deep, results), *files, *chosen]
    status = subprocess.run(typed, cwd=root, check=False).returncode
    if status == NONE_FOUND and chosen:
        status = 0
    counts, failed = read(results)
    return Outcome(phase.name, status, time.monotonic() - began, counts, failed)


def command(phase: Phase, deep: bool, results: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "pytest", "-m", phase.expression(deep)),
        *("-n", str(phase.processes), "--dist", *phase.distribution),
        *("--junitxml", str(results), "-o", "junit_family=xunit1"),
    ]


def read(results: Path) -> tuple[Counter[str], tuple[str, ...]]:
    """Return how many tests passed, failed and were skipped, and the names of those that failed. Nothing, if
    pytest ended before it wrote them down."""
    counts, failed = Counter[str](), list[str]()
    for case in ET.parse(results).iter("testcase") if results.exists() else ():
        if case.find("failure") is not None or case.find("error") is not None:
            counts["failed"] += 1
            failed.append(name(case))
        else:
            counts["skipped" if case.find("skipped") is not None else "passed"] += 1
    return counts, tuple(failed)


def name(case: ET.Element) -> str:
    """Return what pytest takes to run this test alone."""
    file = case.get("file", "")
    of_class = case.get("classname", "").removeprefix(file.removesuffix(".py").replace("/", "."))
    return "::".join([part for part in (file, *of_class.split("."), case.get("name", "")) if part])


def report(outcomes: Sequence[Outcome]) -> str:
    """Return a line for each phase, then what failed in which."""
    lines = [*map(str, outcomes), f"{sum(outcome.seconds for outcome in outcomes) / 60:.1f} minutes"]
    for outcome in outcomes:
        if outcome.status:
            names = outcome.failed or [why(outcome)]
            lines += [f"failed in {outcome.phase}:", *(f"  {name}" for name in names)]
    return "\n".join(lines)


def why(outcome: Outcome) -> str:
    """Say how pytest itself ended, where no test failed."""
    if outcome.status < 0:
        return f"pytest was ended by {signal.Signals(-outcome.status).name}"
    return f"pytest ended with status {outcome.status}: see its output above"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
