"""Submits that a worker's load report does not know of yet."""

from __future__ import annotations

from collections import deque

from baton.v1 import worker_pb2 as pb


class Sent:
    """What was submitted on one stream and is not in a report. The stream keeps its order, and a report says
    how many submits it has taken in: those sent after it was made stay counted."""

    def __init__(self) -> None:
        self.tokens = 0
        """Of prompts, to be computed."""
        self.sequences = 0
        self._open: deque[tuple[int, int]] = deque()
        self._taken = 0

    def add(self, tokens: int, sequences: int) -> None:
        self._open.append((tokens, sequences))
        self.tokens += tokens
        self.sequences += sequences

    def acknowledge(self, load: pb.Load) -> None:
        """Forget what is in a report; all of it, if the worker does not count submits."""
        while self._open and (not load.HasField("submits_taken") or self._taken < load.submits_taken):
            tokens, sequences = self._open.popleft()
            self.tokens -= tokens
            self.sequences -= sequences
            self._taken += 1
