"""Reads workload files, with errors that name the file and the place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from baton.bench.workload.items import WorkloadError

MAX_BYTES = 4 * 1024**3


def read_bytes(path: Path) -> bytes:
    """Read a whole file. Raises WorkloadError when it cannot be read."""
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise WorkloadError(f"{path}: {size} bytes; at most {MAX_BYTES} are read")
        return path.read_bytes()
    except OSError as error:
        raise WorkloadError(f"{path}: {error.strerror}") from None


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not blank, with their numbers from 1. Raises WorkloadError."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise WorkloadError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise WorkloadError(f"{path}: is not UTF-8 text: {error.reason}") from None


def at_line(path: Path, number: int, problem: str) -> WorkloadError:
    """Return the error of one line."""
    return WorkloadError(f"{path}, line {number}: {problem}")
