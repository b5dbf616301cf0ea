"""Where threads and tasks stand, as text for a log."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Iterable
from types import FrameType

MOST_TASKS = 200
MOST_FRAMES = 40


def of_thread(ident: int) -> str:
    """The stack of one thread, the innermost call last; empty if there is no such thread."""
    frame = sys._current_frames().get(ident)
    if frame is None:
        return ""
    return "".join(traceback.format_stack(frame, limit=MOST_FRAMES)).rstrip()


def of_threads(but: Iterable[int] = ()) -> str:
    """The stacks of all threads, each under its name, without those of ``but``."""
    left_out = set(but)
    return "\n".join(
        f"thread {thread.name}:\n{of_thread(thread.ident)}"
        for thread in threading.enumerate()
        if thread.ident is not None and thread.ident not in left_out
    )


def of_tasks(loop: asyncio.AbstractEventLoop) -> str:
    """Where a loop's tasks wait, each under its name; from any thread. Of very many, some."""
    tasks = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())
    lines = []
    for task in tasks[:MOST_TASKS]:
        lines.append(f"task {task.get_name()}, told to end {task.cancelling()} times:")
        lines += _waits(task.get_coro())
    if len(tasks) > MOST_TASKS:
        lines.append(f"and {len(tasks) - MOST_TASKS} more")
    return "\n".join(lines)


def _waits(awaited: object) -> list[str]:
    """Each coroutine that waits for the next, and what the last one waits for. A task's own account has only
    the first."""
    lines: list[str] = []
    while awaited is not None and len(lines) < MOST_FRAMES:
        frame = _first(awaited, "cr_frame", "gi_frame", "ag_frame")
        if isinstance(frame, FrameType):
            lines.append(f"  {frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_qualname}")
        else:
            lines.append(f"  {awaited!r:.200}")
        awaited = _first(awaited, "cr_await", "gi_yieldfrom", "ag_await")
    return lines


def _first(of: object, *names: str) -> object:
    return next((value for name in names if (value := getattr(of, name, None)) is not None), None)
