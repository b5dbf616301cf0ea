"""What passes between the router's APIs and its ring of workers."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from baton.request.limits import ModelInfo
from baton.sampling_params import SamplingParams
from baton.text.choice import FinishReason, TokenChunk

__all__ = ["FinishReason", "ModelInfo", "Ring", "RingError", "TokenChunk"]


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
        self, request_id: str, prompt_ids: list[int], params: SamplingParams
    ) -> AsyncGenerator[TokenChunk]:
        """Run one request. Closing the generator cancels it on every worker that knows it.

        Raises RingError when no worker can take it or a worker is lost on the way.
        """
