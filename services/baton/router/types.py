"""What passes between the router's APIs and its ring of workers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

from baton.logprobs import TokenDetails
from baton.sampling_params import SamplingParams

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the ready workers say of the model they serve."""

    name: str
    revision: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int] = frozenset()


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


@dataclass(frozen=True, slots=True)
class Request:
    """One answer to a prompt, as workers know it."""

    request_id: str
    params: SamplingParams


class RingError(Exception):
    """The ring could not answer. ``status`` is the HTTP status, ``code`` a stable word for programs."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class Ring(Protocol):
    """The workers, as the APIs see them."""

    @property
    def model(self) -> ModelInfo | None:
        """None until a worker has told what it serves."""

    @property
    def ready(self) -> bool:
        """Whether a request submitted now could be placed."""

    def generate(
        self, prompt_ids: list[int], requests: Sequence[Request]
    ) -> AbstractContextManager[Sequence[AsyncGenerator[TokenChunk]]]:
        """Answer one prompt once for each of ``requests``, which differ in their seeds only; the prompt is
        computed once. Nothing is sent before the first generator is asked for a chunk.

        Closing a generator cancels its request on every worker that knows it; leaving the context cancels
        those that are left. The generators raise RingError when no worker can take the requests or a worker
        is lost on the way.
        """
