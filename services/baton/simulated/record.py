"""The log of when every token left a simulated worker, for measuring what comes after the worker."""

from __future__ import annotations

import time
from pathlib import Path

from baton.engine.execution import StepResult


class TokenLog:
    """A line for each token: nanoseconds on the system's monotonic clock, request id, index in its answer.

    Tokens of forks are not told apart from those of the answer they branch off.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)  # unbuffered: it is read while this runs

    def step(self, result: StepResult) -> None:
        now = time.monotonic_ns()
        lines = [f"{now} {seq.request_id} {seq.num_outputs}\n" for seq in result.tokens]
        self._file.write("".join(lines).encode())
