"""What passes between the router's APIs and its ring of workers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from baton.request.limits import ModelInfo
from baton.router.traces.record import AnswerTrace
from baton.sampling_params import SamplingParams
from baton.text.choice import FinishReason, TokenChunk
from baton.urgency import Urgency

__all__ = [
    "DEADLINE_EXCEEDED",
    "FinishReason",
    "ModelInfo",
    "Passage",
    "Request",
    "Ring",
    "RingError",
    "TokenChunk",
    "deadline_exceeded",
]

DEADLINE_EXCEEDED = "deadline_exceeded"


@dataclass(slots=True)
class Passage:
    """How far a request has come in the ring, which writes it. Moments of ``time.perf_counter``."""

    placed: float | None = None
    """Workers were chosen, and told, for the first time."""
    begun: float | None = None
    """A worker said for the first time that it begins to compute."""
    interruptions: int = 0
    """Attempts that ended before the request did, but for those that were refused."""


@dataclass(frozen=True, slots=True)
class Request:
    """One answer to a prompt, as workers know it."""

    request_id: str
    params: SamplingParams
    cache_salt: bytes = b""
    """Cached blocks are shared within one salt only; the same for all answers to a prompt."""
    trace: AnswerTrace | None = None
    """Hears of its attempts."""
    passage: Passage = field(default_factory=Passage, compare=False, kw_only=True)


class RingError(Exception):
    """The ring could not answer. ``status`` is the HTTP status, ``code`` a stable word for programs."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def deadline_exceeded() -> RingError:
    """A request that took longer than its client would wait."""
    message = "The request's deadline passed before its answer was complete."
    return RingError(504, DEADLINE_EXCEEDED, message)


class Ring(Protocol):
    """The workers, as the APIs see them."""

    @property
    def model(self) -> ModelInfo | None:
        """None until a worker has told what it serves."""

    @property
    def ready(self) -> bool:
        """Whether a request submitted now could be placed, by what is known, and known lately enough, of the
        workers."""

    @property
    def stale(self) -> bool:
        """Who is a worker was not confirmed for too long."""

    def generate(
        self, prompt_ids: list[int], requests: Sequence[Request], urgency: Urgency
    ) -> AbstractContextManager[Sequence[AsyncGenerator[TokenChunk]]]:
        """Answer one prompt once for each of ``requests``, which differ in their seeds only; the prompt is
        computed once. ``urgency`` is that of all of them. Nothing is sent before the first generator is asked
        for a chunk.

        Closing a generator cancels its request on every worker that knows it; leaving the context cancels
        those that are left. A request whose workers are lost goes on elsewhere. The generators raise
        RingError when nobody can take the requests for too long, too many attempts have failed, or the
        deadline has passed.
        """
