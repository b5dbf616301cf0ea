"""Every command that the README shows is typed here, against what it starts itself."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts.packaging.first_answer import Served, free_port, served
from scripts.packaging.first_screen import at_port, commands, of_file

pytestmark = pytest.mark.beside

ROOT = Path(__file__).parents[2]
SHOWN = of_file(ROOT / "README.md")
BATON = shlex.join([sys.executable, "-m", "baton"])
SMALL = ("--grpc-port", "-1", "--threads-per-worker", "1", "--kv-cache-memory", "64MiB")


def recipe(target: str) -> list[str]:
    """Return what make would run for a target where all is installed."""
    command = ["make", "--no-print-directory", "-n", "-o", ".venv/.worker", "-o", ".venv/.dev", target]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return said.stdout.splitlines()


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """What ``make run`` starts."""
    [line] = recipe("run")
    command = shlex.split(re.sub(r"^exec \.venv/bin/baton", BATON, line))
    port = free_port()
    folder = tmp_path_factory.mktemp("run")
    with served([*command, "--port", str(port), *SMALL], port, folder, os.environ, 120) as server:
        yield server


def run(ring: Served, *_: object) -> None:
    answer = ring.ask()
    assert answer.text.startswith("Baton ")
    assert answer.num_events > 4


def all_tests(*_: object) -> None:
    assert [line for line in recipe("test") if "-m scripts.phases" in line]


def curl(ring: Served, command: str, _: Path) -> None:
    at = at_port(command, ring.port)
    assert at != command
    said = subprocess.run(shlex.split(at), capture_output=True, text=True, timeout=240, check=True).stdout
    assert said.count('data: {"id"') > 4
    assert said.rstrip().endswith("data: [DONE]")


def other_model(_: Served, command: str, tmp_path: Path) -> None:
    """Without the hub the command gets as far as its question for the model, and says which one it is."""
    typed = [*shlex.split(BATON), *shlex.split(command)[1:], "--port", str(free_port()), *SMALL]
    offline = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    ended = subprocess.run(typed, env=offline, capture_output=True, text=True, timeout=240)
    assert ended.returncode != 0
    model = shlex.split(command)[-1]
    assert f"{model}: no such directory, not in the cache, and the hub is out of reach" in ended.stderr


TRIALS: dict[str, Callable[[Served, str, Path], None]] = {
    r"make run": run,
    r"make test": all_tests,
    r"curl -N http://127\.0\.0\.1:8000/.*": curl,
    r"(\.venv/bin/)?baton up --model \w+/\S+": other_model,
}


@pytest.mark.parametrize("command", SHOWN)
def test_commands_of_the_readme(ring: Served, command: str, tmp_path: Path) -> None:
    trials = [trial for pattern, trial in TRIALS.items() if re.fullmatch(pattern, command)]
    assert len(trials) == 1, f"the README shows a command that is not tried: {command}"
    trials[0](ring, command, tmp_path)


def test_the_commands_are_found() -> None:
    block = "```\nmake run   # starts\ncurl -N a \\\n  -d b\n```\n"
    text = f"{block}Ask `baton up --model x/y`, as\n`baton explain` does.\n"
    assert commands(text) == ["make run", "curl -N a -d b", "baton up --model x/y"]
    assert {"make run", "make test"} <= set(SHOWN)
