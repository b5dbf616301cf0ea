"""What passes between the router's APIs and its ring of workers."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Literal, Protocol

from baton.logprobs import TokenDetails
from baton.sampling_params import SamplingParams
from baton.urgency import Urgency

DEADLINE_EXCEEDED = "deadline_exceeded"
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the ready workers say of the model they serve."""

    name: str
    revision: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int] = frozenset()
    takes_priorities: bool = False
    """Whether the workers schedule by priority."""


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Tokens of one request, in order, exactly once. The last chunk has ``finish_reason`` set.

    ``cached_tokens`` (prompt tokens found in a prefix cache) comes with the first chunk. ``details`` is what
    the request asked to be told besides; None: nothing.
    """

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    details: TokenDetails | None = None


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
        """Whether a request submitted now could be placed."""

    def generate(
        self, request_id: str, prompt_ids: list[int], params: SamplingParams, urgency: Urgency
    ) -> AsyncGenerator[TokenChunk]:
        """Run one request. Closing the generator cancels it on every worker that knows it.

        Raises RingError when no worker can take it, a worker is lost on the way, or its deadline has passed.
        """
