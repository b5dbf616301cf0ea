"""The interpreters of this machine that Baton supports."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

VERSIONS = ("3.11", "3.12", "3.13")
_USABLE = "import sys, venv, ensurepip; print(f'{sys.version_info[0]}.{sys.version_info[1]}')"


def found() -> dict[str, Path]:
    """Return an interpreter with ``venv`` for each of ``VERSIONS``, from PATH, pyenv or uv."""
    chosen: dict[str, Path] = {}
    for version in VERSIONS:
        for candidate in _candidates(version):
            if _version_of(candidate) == version:
                chosen[version] = candidate
                break
    return chosen


def _candidates(version: str) -> Iterator[Path]:
    home = Path.home()
    for place in os.get_exec_path():
        yield Path(place) / f"python{version}"
    pyenv = Path(os.environ.get("PYENV_ROOT", home / ".pyenv")) / "versions"
    uv = Path(os.environ.get("UV_PYTHON_INSTALL_DIR", home / ".local" / "share" / "uv" / "python"))
    for root, pattern in ((pyenv, f"{version}.*"), (uv, f"cpython-{version}.*")):
        yield from (
            folder / "bin" / f"python{version}" for folder in sorted(root.glob(pattern), reverse=True)
        )


def _version_of(python: Path) -> str | None:
    """Return what version an interpreter says it is; None where it is none that makes environments."""
    if not os.access(python, os.X_OK):
        return None
    ended = subprocess.run([python, "-c", _USABLE], capture_output=True, text=True)
    return ended.stdout.strip() if ended.returncode == 0 else None
