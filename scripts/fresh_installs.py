"""Install the wheel where there is no repository, and ask what it starts.

    python -m scripts.fresh_installs [--python 3.11 ...] [--serve "up"] [--newest] [--keep FOLDER]

Builds wheel and sdist and compares the wheel that the sdist builds. Then, with each Python from 3.11 to 3.13
that this machine has, in new environments outside of the repository: the router alone, which must bring no
torch; a worker, whose ring of the demo model must stream an answer, with kernels built from the wheel's
sources; with the first Python, pipx as well. Exit status 1 if any of it fails or a Python is missing. The
pins are those of constraints.txt; ``--newest`` takes what the index has today.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console

from scripts.packaging import pythons
from scripts.packaging.distributions import ROOT, WHEEL_LIMIT, DiffersError, built, contents
from scripts.packaging.environments import Environment, clean_environment
from scripts.packaging.first_answer import NoAnswerError, free_port, served

TOOLS = ("build", "hatchling")
PATIENCE_S = 300.0
CONSTRAINTS = ROOT / "constraints.txt"


class RefusedError(Exception):
    """An installation is not what it must be."""


def main() -> int:
    chosen = _options()
    console = Console(width=140, highlight=False)
    there = pythons.found()
    failed = [f"Python {version}: not on this machine" for version in chosen.python if version not in there]
    keeping = nullcontext(str(chosen.keep)) if chosen.keep else tempfile.TemporaryDirectory()
    with keeping as scratch:
        folder = Path(scratch)
        tools = Environment.made(Path(sys.executable), folder / "tools")
        try:
            tools.install(*TOOLS, constraints=CONSTRAINTS)
            wheel = _distributions(tools, folder / "dist", console)
        except (DiffersError, RefusedError, subprocess.CalledProcessError) as error:
            console.print(str(error))
            return 1
        constraints = None if chosen.newest else CONSTRAINTS
        for version in chosen.python:
            if version in there:
                try:
                    trial = _Trial(there[version], wheel, folder / version, constraints, console)
                    trial.router_alone()
                    trial.worker(shlex.split(chosen.serve))
                    if version == chosen.python[0]:
                        trial.by_pipx()
                except (RefusedError, NoAnswerError, subprocess.CalledProcessError) as error:
                    failed.append(f"Python {version}: {error}")
    for line in failed:
        console.print(f"FAILED  {line}", soft_wrap=True)
    console.print(f"VERDICT: {'FAILED' if failed else 'ok'}")
    return int(bool(failed))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--python", nargs="+", choices=pythons.VERSIONS, default=pythons.VERSIONS)
    parser.add_argument("--serve", default="up --grpc-port -1", help="what follows `baton`; --port is added")
    parser.add_argument("--newest", action="store_true", help="without the pins of constraints.txt")
    parser.add_argument("--keep", type=Path, help="an empty folder in which everything stays")
    return parser.parse_args()


def _distributions(tools: Environment, folder: Path, console: Console) -> Path:
    """Build both and return the wheel."""
    distributions = built(tools, folder)
    wheel, sdist = distributions.wheel, distributions.sdist
    unpacked = contents(wheel)
    console.print(f"{wheel.name}: {_mb(wheel.stat().st_size)}, {len(unpacked)} files", end="")
    console.print(f", {_mb(sum(unpacked.values()))} unpacked; the sdist builds the same, bit for bit")
    console.print(f"{sdist.name}: {_mb(sdist.stat().st_size)}")
    if wheel.stat().st_size > WHEEL_LIMIT:
        raise RefusedError(f"{wheel.name} is larger than {_mb(WHEEL_LIMIT)}")
    return wheel


class _Trial:
    """Installations with one Python."""

    def __init__(
        self, python: Path, wheel: Path, folder: Path, constraints: Path | None, console: Console
    ) -> None:
        self._python = python
        self._wheel = wheel
        self._folder = folder
        self._constraints = constraints
        self._console = console
        folder.mkdir()

    def router_alone(self) -> None:
        """Install without an extra. Raises RefusedError where torch or numpy come along."""
        environment, took = self._installed("router", str(self._wheel))
        for module in ("torch", "numpy"):
            if environment.has(module):
                raise RefusedError(f"the router brought {module}")
        environment.run("-c", "import baton.router.main")
        told = environment.called("baton", "--version").strip()
        if self._wheel.name.split("-")[1] not in told.split():
            raise RefusedError(f"baton --version says {told!r}, and the wheel is {self._wheel.name}")
        self._told("router alone, no torch", environment, took)

    def worker(self, serve: Sequence[str]) -> None:
        """Install with the extra ``worker``, start a ring and ask it. Raises RefusedError, NoAnswerError."""
        environment, took = self._installed("worker", f"{self._wheel}[worker]")
        self._told("worker", environment, took)
        port = free_port()
        command = environment.command("baton", *serve, "--port", str(port))
        cache = self._folder / "cache"
        environment_of = clean_environment(BATON_CACHE_DIR=str(cache))
        with served(command, port, self._folder, environment_of, PATIENCE_S) as server:
            answer = server.ask()
        if "Baton" not in answer.text or answer.num_events < 2:
            raise RefusedError(f"{shlex.join(serve)} answered {answer.text!r} in {answer.num_events} events")
        if not any(cache.rglob("*.so")):
            raise RefusedError("no kernels were built: the wheel lacks their sources, or there is no g++")
        self._say(f"baton {shlex.join(serve)}", f"first token after {answer.began_s:.1f} s: {answer.text!r}")

    def by_pipx(self) -> None:
        """Install the router with pipx and call it."""
        tools = Environment.made(self._python, self._folder / "pipx-tools")
        tools.install("pipx")
        home = {"PIPX_HOME": str(self._folder / "pipx"), "PIPX_BIN_DIR": str(self._folder / "pipx-bin")}
        command = tools.command("pipx", "install", "--python", str(self._python), str(self._wheel))
        subprocess.run(command, check=True, env=clean_environment(**home), capture_output=True, text=True)
        baton = self._folder / "pipx-bin" / "baton"
        told = subprocess.run([baton, "--version"], capture_output=True, text=True, check=True)
        self._say("pipx install", told.stdout.strip())

    def _installed(self, name: str, requirement: str) -> tuple[Environment, float]:
        """Install into a new environment; return it with the seconds that took."""
        environment = Environment.made(self._python, self._folder / name)
        began = time.monotonic()
        environment.install(requirement, constraints=self._constraints)
        return environment, time.monotonic() - began

    def _told(self, what: str, environment: Environment, took: float) -> None:
        sizes = environment.sizes()
        own = sizes["baton"]
        others = sum(sizes.values()) - own - sizes.get("pip", 0) - sizes.get("setuptools", 0)
        self._say(what, f"installed in {took:.0f} s: Baton {_mb(own)}, other packages {_mb(others)}")

    def _say(self, what: str, found: str) -> None:
        self._console.print(f"Python {self._folder.name}  {what:24}  {found}", soft_wrap=True)


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


if __name__ == "__main__":
    sys.exit(main())
