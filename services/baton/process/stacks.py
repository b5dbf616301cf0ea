"""The stacks of threads and tasks, as text for a log."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Iterable
from types import FrameType

MAX_TASKS = 200
MAX_FRAMES = 40


def of_thread(ident: int) -> str:
    """Return the stack of one thread, the innermost call last. Empty if there is no such thread."""
    frame = sys._current_frames().get(ident)
    if frame is None:
        return ""
    return "".join(traceback.format_stack(frame, limit=MAX_FRAMES)).rstrip()


def of_threads(but: Iterable[int] = ()) -> str:
    """Return the stacks of all threads but ``but``, each under its name."""
    left_out = set(but)
    return "\n".join(
        f"thread {thread.name}:\n{of_thread(thread.ident)}"
        for thread in threading.enumerate()
        if thread.ident is not None and thread.ident not in left_out
    )


def of_tasks(loop: asyncio.AbstractEventLoop) -> str:
    """Return where a loop's tasks wait, each under its name, at most ``MAX_TASKS`` tasks. May be called from
    any thread."""
    tasks = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())
    lines = []
    for task in tasks[:MAX_TASKS]:
        lines.append(f"task {task.get_name()}, told to end {task.cancelling()} times:")
        lines += _waits(task.get_coro())
    if len(tasks) > MAX_TASKS:
        lines.append(f"and {len(tasks) - MAX_TASKS} more")
    return "\n".join(lines)


def _waits(awaited: object) -> list[str]:
    """Return the chain of coroutines that wait for each other, and what the last one waits for.
    ``Task.get_stack`` has the first coroutine only."""
    lines: list[str] = []
    while awaited is not None and len(lines) < MAX_FRAMES:
        frame = _first(awaited, "cr_frame", "gi_frame", "ag_frame")
        if isinstance(frame, FrameType):
            lines.append(f"  {frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_qualname}")
        else:
            lines.append(f"  {awaited!r:.200}")
        awaited = _first(awaited, "cr_await", "gi_yieldfrom", "ag_await")
    return lines


def _first(of: object, *names: str) -> object:
    return next((value for name in names if (value := getattr(of, name, None)) is not None), None)
