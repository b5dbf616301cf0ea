"""Tests compute in one thread, but for those of what several do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


@contextmanager
def in_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def threads() -> set[int]:
    """Those of this process."""
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}
