"""SIGTERM to a service that starts, as process 1 of a PID namespace with the images' own entrypoint.

``python -m loadtest.sigterm_starts`` measures it, at more moments.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.sigterm_starts import UNSHARE, command_of_this_tree, end_of, entrypoint, roles, silent_server

ENDED = 128 + 15
HEARD = {ENDED, 0, 130}
"""Exit statuses of what ends by SIGTERM, and of a service and of ``baton up`` that end in order."""
MOMENT_S = 0.5
ROLES = ("router", "worker-sim", "planner", "prefill", "decode", "both", "decode, 2 ranks", "node", "up")


def can_unshare() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode == 0


pytestmark = pytest.mark.skipif(not can_unshare(), reason="this user may not make PID namespaces")
needs_tini = pytest.mark.skipif(shutil.which("tini") is None, reason="tini is missing (scripts/test-servers)")


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """The folder of the command ``baton``."""
    with command_of_this_tree() as found:
        yield found


@needs_tini
@pytest.mark.parametrize("role", ROLES)
def test_a_start_ends_when_it_is_told_to(folder: Path, role: str) -> None:
    with silent_server() as silent:
        image, arguments = roles(folder, silent)[role]
        _, status = end_of([*entrypoint(image), *arguments], folder, MOMENT_S)
    assert status in HEARD, "and not killed in the end"


@pytest.mark.parametrize("role", ["worker-sim", "decode"])
def test_where_baton_is_process_1_its_own_init_hears_it(folder: Path, role: str) -> None:
    """From the moment on that Python runs, which takes longer on a busy machine: hence the late moment."""
    with silent_server() as silent:
        _, arguments = roles(folder, silent)[role]
        _, status = end_of(["baton", *arguments], folder, 4 * MOMENT_S)
    assert status in HEARD


@pytest.mark.parametrize(("arguments", "status"), [(["version"], 0), (["router", "--port", "x"], 2)])
def test_process_1_has_the_status_of_the_command(arguments: list[str], status: int) -> None:
    done = subprocess.run([*UNSHARE, sys.executable, "-m", "baton", *arguments], check=False)
    assert done.returncode == status


def test_process_1_reaps_orphans() -> None:
    """A child ends before its own child does; the status is the command's all the same."""
    program = (
        "import os, subprocess, time\n"
        "from baton.process.init import leave_process_one\n"
        "leave_process_one()\n"
        "subprocess.run(['sh', '-c', 'sleep 0.2 & exit 0'])\n"
        "ours = {'1', str(os.getpid())}\n"
        "orphans = lambda: [each for each in os.listdir('/proc') if each.isdigit() and each not in ours]\n"
        "assert orphans()\n"
        "until = time.monotonic() + 10\n"
        "while orphans() and time.monotonic() < until: time.sleep(0.05)\n"
        "os._exit(7 if not orphans() else 8)\n"
    )
    assert subprocess.run([*UNSHARE, sys.executable, "-c", program], check=False).returncode == 7
