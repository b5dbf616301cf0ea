"""Where threads and tasks stand, as text for a log."""

from __future__ import annotations

import asyncio
import io
import sys
import threading
import traceback
from collections.abc import Iterable

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
    """The stacks of a loop's tasks, each under its name; from any thread. Of very many, some."""
    tasks = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())
    text = io.StringIO()
    for task in tasks[:MOST_TASKS]:
        text.write(f"task {task.get_name()}, {task.cancelling()} times told to end:\n")
        task.print_stack(limit=MOST_FRAMES, file=text)
    if len(tasks) > MOST_TASKS:
        text.write(f"and {len(tasks) - MOST_TASKS} more\n")
    return text.getvalue().rstrip()
