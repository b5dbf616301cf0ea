"""The types that pass between the router's APIs and its ring of workers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from baton.core.priority import Priority
from baton.core.sampling_params import ResolvedSampling
from baton.request.limits import ModelInfo
from baton.router.traces.record import AnswerTrace
from baton.text.choice import FinishReason, TokenChunk

__all__ = [
    "DEADLINE_EXCEEDED",
    "FinishReason",
    "ModelInfo",
    "Request",
    "RequestTimings",
    "Ring",
    "RingError",
    "TokenChunk",
    "deadline_exceeded",
]

DEADLINE_EXCEEDED = "deadline_exceeded"


@dataclass(slots=True)
class RequestTimings:
    """The stages that a request has reached in the ring, which writes them. Times are of
    ``time.perf_counter``."""

    placed: float | None = None
    """The time at which workers were first chosen and told."""
    begun: float | None = None
    """The time at which a worker first said that it begins to compute."""
    interruptions: int = 0
    """Attempts that ended before the request did, without those that were refused."""


@dataclass(frozen=True, slots=True)
class Request:
    """One answer to a prompt, as workers know it."""

    request_id: str
    params: ResolvedSampling
    cache_salt: bytes = b""
    """The salt within which cached blocks are shared; the same for all answers to a prompt."""
    trace: AnswerTrace | None = None
    """The trace that records the request's attempts, if there is one."""
    timings: RequestTimings = field(default_factory=RequestTimings, compare=False, kw_only=True)


class RingError(Exception):
    """The ring could not answer. ``status`` is the HTTP status, ``code`` a stable word for programs."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def deadline_exceeded() -> RingError:
    """Return the error of a request whose deadline has passed."""
    message = "The request's deadline passed before its answer was complete."
    return RingError(504, DEADLINE_EXCEEDED, message)


class Ring(Protocol):
    """The workers, as the APIs see them."""

    @property
    def model(self) -> ModelInfo | None:
        """The model that the workers serve; None until a worker has told."""

    @property
    def ready(self) -> bool:
        """Whether a request submitted now could be placed, as far as the workers are known, and known
        recently enough."""

    @property
    def stale(self) -> bool:
        """Whether the list of workers was not confirmed for too long."""

    def unlinked_pairs(self) -> Mapping[str, int]:
        """Return the number of pairs of ready workers that can never be linked, by the field in which the two
        differ."""

    def generate(
        self, prompt_ids: list[int], requests: Sequence[Request], priority: Priority
    ) -> AbstractContextManager[Sequence[AsyncGenerator[TokenChunk]]]:
        """Answer one prompt once for each of ``requests``, which differ in their seeds only; the prompt is
        computed once. ``priority`` is that of all of them. Nothing is sent before the first generator is
        asked for a chunk.

        Closing a generator cancels its request on every worker that knows it; leaving the context cancels
        the others. A request whose workers are lost continues on other workers. The generators raise
        RingError when no worker can take the requests for too long, too many attempts have failed, or the
        deadline has passed.
        """
