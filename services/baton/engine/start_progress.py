"""What an engine tells while it starts: the stage, and how far that is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from baton.engine.graphs import Recording
from baton.engine.memory import StepRecorder

StartProgress = Callable[[str, int, int], None]
"""Told of the stage, of what is done, and of how much there is."""

LOAD = "load"
"""The stage in which weights are read. Its progress is in bytes."""
CAPTURE = "capture"
"""The stage in which steps are recorded as graphs. Its progress is in steps."""


class ToldRecorder:
    """A recorder that tells after each step how many of ``total`` are recorded."""

    def __init__(self, record: StepRecorder, total: int, progress: StartProgress) -> None:
        self._record = record
        self._total = total
        self._progress = progress
        self._done = 0

    def __call__(self, run: Callable[[], None]) -> Recording:
        recording = self._record(run)
        self._tell()
        return recording

    @contextmanager
    def step(self) -> Iterator[None]:
        with self._record.step():
            yield
        self._tell()

    def begin(self) -> None:
        self._record.begin()

    def end(self) -> Recording:
        return self._record.end()

    def _tell(self) -> None:
        self._done += 1
        self._progress(CAPTURE, self._done, self._total)
