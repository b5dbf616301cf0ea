"""The processor's cores: which ones a measurement may use, and which of its processes gets which."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path


def available() -> list[int]:
    """Return the cores that this process, and the processes that it starts, may use."""
    return sorted(os.sched_getaffinity(0))


def share_out(cores: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return one half for prefill and one for decode; an odd core is left over. Raises SystemExit below
    two."""
    half = len(cores) // 2
    if not half:
        raise SystemExit(f"prefill and decode need a core each, and there is {len(cores)}")
    return list(cores[:half]), list(cores[half : 2 * half])


def pin(pid: int, cores: Collection[int]) -> None:
    """Keep a running process, all of its threads, on these cores; threads yet to come inherit it."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)
