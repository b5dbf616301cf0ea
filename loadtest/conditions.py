"""The conditions of a measurement: the command, the machine and the versions."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from loadtest import cores

VERSIONS = """
from importlib.metadata import version
print(", ".join(f"{name} {version(name)}" for name in ("vllm", "torch", "nixl")))
"""


def conditions(program: str, peers: Path | None = None) -> list[str]:
    """Return the conditions, a line each; ``peers`` where vLLM takes part. Raises CalledProcessError if it is
    not there."""
    lines = [
        shlex.join(["python", "-m", program, *sys.argv[1:]]),
        f"{_processor()}, {len(cores.available())} of {os.cpu_count()} cores",
        f"Python {platform.python_version()}, torch {version('torch')}, Baton {version('baton')}",
    ]
    if peers is not None:
        ask = [str(peers / "bin" / "python"), "-c", VERSIONS]
        lines.append(subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip())
    return lines


def _processor() -> str:
    """Return the processor's name as Linux has it; elsewhere as Python knows it."""
    told = Path("/proc/cpuinfo")
    lines = told.read_text().splitlines() if told.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
