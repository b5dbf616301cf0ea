"""The tokens delivered for the requests under way, and the check of which frames may add to them.

Rule 8 of the handoff: a client's stream has one writer. A delta is taken only if it is of the current attempt
and continues exactly where the delivered tokens end; what it repeats is cut off.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.core.attempt_failure import AttemptFailure, failure_from_proto
from baton.core.logprobs import Logprobs, TokenDetails
from baton.router.dispatch.types import FinishReason, RingError, TokenChunk, deadline_exceeded
from baton.v1 import inference_pb2, worker_pb2

_FINISH: dict[int, FinishReason] = {
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
}


@dataclass(slots=True)
class LedgerEntry:
    """The delivered tokens of one request, ``output_ids``. Only tokens of ``attempt`` count."""

    attempt: int = 0
    output_ids: list[int] = field(default_factory=list)
    finished: bool = False

    def accept(self, delta: worker_pb2.TokenDelta) -> TokenChunk | RingError | None:
        """Return the new tokens of ``delta``, an error that ends the request, or None if nothing is new.

        A gap (tokens beyond the next) is an error: tokens were lost on the way.
        """
        if self.finished or delta.attempt != self.attempt:
            return None
        if delta.finish_reason == inference_pb2.FINISH_REASON_ERROR:
            self.finished = True
            return failure(delta)
        repeated = len(self.output_ids) - delta.first_seq
        if repeated < 0:
            self.finished = True
            return RingError(500, "tokens_lost", "tokens of this request were lost between worker and router")
        token_ids = tuple(delta.token_ids[repeated:])
        finish = _FINISH.get(delta.finish_reason)
        if not token_ids and finish is None:
            return None
        first = not self.output_ids
        self.output_ids.extend(token_ids)
        self.finished = finish is not None
        details = _new_details(delta.details, repeated, first) if delta.HasField("details") else None
        return TokenChunk(token_ids, finish, delta.cached_tokens if first else 0, details, self.attempt)


def failure(delta: worker_pb2.TokenDelta) -> RingError:
    """Return the error that the client gets for a worker's failure that ends its request."""
    match failure_from_proto(delta):
        case AttemptFailure.EXPIRED:
            return deadline_exceeded()
        case AttemptFailure.INVALID:
            return RingError(400, "invalid_value", delta.error)
        case _:
            return RingError(503, "worker_error", delta.error)


def _new_details(details: worker_pb2.TokenDetails, repeated: int, first: bool) -> TokenDetails:
    """Return the details of a delta, without those of the tokens that it repeats."""
    logprobs = prompt_logprobs = None
    if details.HasField("logprobs"):
        logprobs = Logprobs.from_proto(details.logprobs)[repeated:]
    if first and details.HasField("prompt_logprobs"):
        prompt_logprobs = Logprobs.from_proto(details.prompt_logprobs)
    return TokenDetails(logprobs, prompt_logprobs)
