"""The speed of a worker as its router sees it: the times that tell a slow worker from others of its role."""

from __future__ import annotations

from baton.core.role import Role
from baton.v1 import worker_pb2 as pb

PROMPT_UNIT = 256
"""Prompt tokens that a prefill worker's times are scaled to; a shorter prompt counts as this long."""
MAX_AWAITED = 4096


class StepTimes:
    """The step times of the worker at one stream. For a worker that decodes, the time between two frames with
    tokens while it runs something; for one that only prefills, the time from a submit to its first token, for
    each ``PROMPT_UNIT`` of tokens computed until then."""

    def __init__(self) -> None:
        self._ran_at: float | None = None
        """The start of the step under way, if something runs."""
        self._written: str | None = None
        """An answer that goes on with this step, if there is one. Frames without tokens are then load reports
        in the middle of the step: they come every half second, and the steps of a slow worker take longer."""
        self._awaited: dict[str, tuple[float, int]] = {}
        """Submits without a token yet: the time of each, and the tokens that were to be computed."""

    def submitted(self, request_id: str, tokens: int, now: float) -> None:
        if len(self._awaited) >= MAX_AWAITED:  # the oldest got no token, as a beam search gets none
            del self._awaited[next(iter(self._awaited))]
        self._awaited[request_id] = now, max(tokens, PROMPT_UNIT)

    def cancelled(self, request_id: str) -> None:
        self._awaited.pop(request_id, None)
        if request_id == self._written:
            self._written = None

    def take(self, frame: pb.Frame, role: Role, now: float) -> list[float]:
        """Take in a frame and return the times that it completes, in seconds."""
        told = any(delta.token_ids for delta in frame.deltas)
        waits = (
            [
                (delta, self._awaited.pop(delta.request_id, None))
                for delta in frame.deltas
                if not delta.started
            ]
            if self._awaited
            else []
        )
        before = self._ran_at
        if told or self._written is None or not frame.load.running or self._is_over(frame):
            self._ran_at = now if frame.load.running else None
            self._written = next((delta.request_id for delta in frame.deltas if _goes_on(delta)), None)
        if role == "prefill":  # a failed request was not computed, and may have failed fast
            return [
                (now - wait[0]) * PROMPT_UNIT / wait[1] for delta, wait in waits if wait and delta.token_ids
            ]
        return [now - before] if before is not None and told else []

    def _is_over(self, frame: pb.Frame) -> bool:
        """Whether the answer in ``_written`` ends without a further token, as by its deadline."""
        return any(delta.finish_reason and delta.request_id == self._written for delta in frame.deltas)


def _goes_on(delta: pb.TokenDelta) -> bool:
    """Whether the answer of a delta has more tokens to come."""
    return bool(delta.token_ids) and not delta.finish_reason
