"""Walk the way of a newcomer, from ``git clone`` to a streamed answer, and time it.

    python -m scripts.newcomer [--source .] [--wheels FOLDER] [--limit 100]

Clones the last commit into an empty folder, runs ``make run`` there, asks as soon as the ring serves, and
then types the README's own ``curl``. Nothing of this checkout takes part: not its ``.venv``, nor its built
kernels. ``--wheels`` is a warm cache of packages: a folder that is filled first, which is not timed, and
which pip then prefers. Exit status 1 if there is no answer, or the first token took longer than ``--limit``.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from scripts.packaging.distributions import ROOT
from scripts.packaging.environments import clean_environment
from scripts.packaging.first_answer import FirstAnswer, NoAnswerError, free_port, served
from scripts.packaging.first_screen import at_port, of_file

PATIENCE_S = 900.0


def main() -> int:
    chosen = _options()
    console = Console(width=140, highlight=False)
    environment = clean_environment()
    if chosen.wheels:
        _fill(chosen.wheels)
        links = f"{environment.get('PIP_FIND_LINKS', '')} {chosen.wheels.resolve()}".strip()
        environment["PIP_FIND_LINKS"] = links
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "baton"
        environment["BATON_CACHE_DIR"] = str(Path(scratch) / "cache")
        began = time.monotonic()
        if subprocess.run(["git", "clone", "--quiet", chosen.source, folder], check=False).returncode:
            console.print(f"FAILED: --source: {chosen.source} cannot be cloned", soft_wrap=True)
            return 1
        cloned_s = time.monotonic() - began
        try:
            answer, curled = _walk(folder, environment)
        except NoAnswerError as error:
            console.print(f"FAILED: {error}", soft_wrap=True)
            return 1
    took = cloned_s + answer.began_s
    console.print(f"git clone                {cloned_s:6.1f} s")
    console.print(f"make run, first token    {answer.began_s:6.1f} s")
    console.print(f"from clone to token      {took:6.1f} s, of {chosen.limit:.0f} s")
    console.print(f"the answer               {answer.text!r}", soft_wrap=True)
    console.print(f"the README's curl        {curled} events")
    late = took > chosen.limit or not curled
    console.print(f"VERDICT: {'FAILED' if late else 'ok'}")
    return int(late)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--source", default=str(ROOT), help="what to clone: a path or an address")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels, filled if there is none")
    parser.add_argument(
        "--limit", type=float, default=100.0, help="seconds from the clone to the first token"
    )
    return parser.parse_args()


def _fill(wheels: Path) -> None:
    """Download what ``make run`` installs, unless the folder is there."""
    if wheels.exists():
        return
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(wheels)]
    command += ["-c", str(ROOT / "constraints.txt"), f"{ROOT}[worker]", "hatchling", "editables"]
    subprocess.run(command, check=True)


def _walk(folder: Path, environment: dict[str, str]) -> tuple[FirstAnswer, int]:
    """Return the first answer of ``make run``, and the number of events that the README's curl brings."""
    port = free_port()
    options = f"ARGS=--port {port} --grpc-port -1"
    with served(["make", "run", options], port, folder, environment, PATIENCE_S) as server:
        answer = server.ask()
        [curl] = [command for command in of_file(folder / "README.md") if command.startswith("curl ")]
        asked = subprocess.run(
            shlex.split(at_port(curl, port)),
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    return answer, asked.stdout.count("data: {")


if __name__ == "__main__":
    sys.exit(main())
