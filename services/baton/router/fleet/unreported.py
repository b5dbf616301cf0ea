"""The load of submits that a worker's report does not include yet."""

from __future__ import annotations

from collections import deque

from baton.v1 import worker_pb2 as pb


class UnreportedLoad:
    """The load submitted on one stream that no report includes yet. The stream keeps its order, and a report
    says how many submits it includes: later submits stay counted."""

    def __init__(self) -> None:
        self.tokens = 0
        """Prompt tokens to compute."""
        self.sequences = 0
        self._open: deque[tuple[int, int]] = deque()
        self._taken = 0

    def add(self, tokens: int, sequences: int) -> None:
        self._open.append((tokens, sequences))
        self.tokens += tokens
        self.sequences += sequences

    def acknowledge(self, load: pb.Load) -> None:
        """Forget the submits that a report includes; all of them, if the worker does not count submits."""
        while self._open and (not load.HasField("submits_taken") or self._taken < load.submits_taken):
            tokens, sequences = self._open.popleft()
            self.tokens -= tokens
            self.sequences -= sequences
            self._taken += 1
