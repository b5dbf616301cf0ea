"""What the checks look at: files of the kernel, limits, commands, packages. Tests put another in place."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import orjson

PROBE_S = 120.0
"""Longest time of a probe. Importing torch from a cold disk takes most of a minute."""
COMMAND_S = 20.0
_TIMEX_BYTES = 512
"""More than ``struct timex`` has anywhere."""


@dataclass(frozen=True, slots=True)
class Ran:
    """A command that has ended, and what it wrote."""

    status: int
    out: str
    err: str

    @property
    def last_words(self) -> str:
        """The last line that it wrote, of errors if there are any."""
        lines = (self.err.strip() or self.out.strip()).splitlines()
        return lines[-1].strip() if lines else f"it ended with status {self.status}"


@dataclass(frozen=True, slots=True)
class Space:
    """The bytes of a file system."""

    total: int
    free: int


class ProbeError(Exception):
    """A probe that could not find out. The message is one line."""


class Machine:
    """The machine, or the container, that this process runs in."""

    def __init__(self, root: Path = Path("/")) -> None:
        """``root``: the folder that /proc, /sys and /dev are looked for in."""
        self.root = root

    def path(self, name: str) -> Path:
        return self.root / name.removeprefix("/")

    def read(self, name: str) -> str:
        """The text of a file; empty if it is not there, or cannot be read."""
        try:
            return self.path(name).read_text(errors="replace")
        except OSError:
            return ""

    def which(self, command: str) -> str | None:
        return shutil.which(command)

    def run(self, command: Sequence[str], timeout_s: float = COMMAND_S) -> Ran:
        """Run a command to its end. What cannot be run, or takes too long, has the status -1."""
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=timeout_s, check=False, errors="replace"
            )
        except OSError as error:
            return Ran(-1, "", f"{command[0]} cannot be run: {error.strerror}")
        except subprocess.TimeoutExpired:
            return Ran(-1, "", f"{command[0]} took more than {timeout_s:.0f} s")
        return Ran(done.returncode, done.stdout, done.stderr)

    def probe(self, name: str, *arguments: str) -> dict[str, object]:
        """The JSON object that a module of `baton.doctor.probes` prints, in a process of its own: what it
        loads may be large, or end its process. Raises ProbeError."""
        module = f"baton.doctor.probes.{name}"
        ran = self.run((sys.executable, "-P", "-m", module, *arguments), PROBE_S)
        lines = ran.out.splitlines()
        if ran.status != 0 or not lines:
            raise ProbeError(ran.last_words)
        told: dict[str, object] = orjson.loads(lines[-1])
        return told

    def limit(self, which: int) -> tuple[int, int]:
        """The soft and hard limit of a resource, as `resource.getrlimit` names it."""
        return resource.getrlimit(which)

    def space(self, name: str) -> Space | None:
        """The bytes of the file system at a path; None if it is not there."""
        try:
            told = os.statvfs(self.path(name))
        except OSError:
            return None
        return Space(told.f_blocks * told.f_frsize, told.f_bavail * told.f_frsize)

    def cores(self) -> int:
        """The cores that this process may run on."""
        return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1

    def clock_state(self) -> int | None:
        """The state of the clock as ``adjtimex`` returns it; None where there is no such call."""
        try:
            state = int(ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES)))
        except (OSError, AttributeError):
            return None
        return state if state >= 0 else None

    def version(self, package: str) -> str | None:
        """The version of an installed package; None: it is not installed."""
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    def requirements(self) -> list[str]:
        """What the package baton requires, extras included; empty if it is not installed as a package."""
        try:
            return metadata.requires("baton") or []
        except metadata.PackageNotFoundError:
            return []


def size_text(size: float) -> str:
    """A number of bytes in words: ``"64 MiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if size >= 10 or unit == "B" else f"{size:.1f} {unit}"
