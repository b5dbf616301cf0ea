"""A rank on a CPU that records its decode steps, by remembering the function: takes the place of
``baton.rank``. Used as a library by its leader, in the test."""

from __future__ import annotations

from collections.abc import Callable

import torch

from baton.engine import graphs
from baton.engine.graphs import Recording


class Remembered:
    """A step that is replayed by running its function again."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        self._run()


class Remembering:
    """Takes the place of ``CudaRecord``."""

    def __init__(self, device: torch.device) -> None:
        self.recordings: list[Remembered] = []

    def __call__(self, run: Callable[[], None]) -> Recording:
        self.recordings.append(Remembered(run))
        return self.recordings[-1]


if __name__ == "__main__":
    graphs.CudaRecord = Remembering  # type: ignore[assignment, misc]
    import baton.rank.__main__  # noqa: F401  # serves its leader until that is gone
