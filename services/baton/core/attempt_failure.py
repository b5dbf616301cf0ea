"""How an attempt at a request failed, as a worker tells its router."""

from __future__ import annotations

from enum import Enum

from baton.v1 import inference_pb2
from baton.v1 import worker_pb2 as pb


class AttemptFailure(Enum):
    """The kind of a failure, which decides what the router may do."""

    REFUSED = "refused"
    """The worker began nothing: the router may ask another worker."""
    HANDOFF_LOST = "lost"
    """The handoff broke: another attempt may continue after the tokens delivered."""
    INVALID = "invalid"
    """The request is at fault, and would fail on any worker."""
    EXPIRED = "expired"
    """The request's deadline has passed."""
    WORKER_ERROR = "worker_error"
    """The worker failed. Another attempt would fail in the same way: the client is told."""


def failure_to_proto(
    request_id: str, attempt: int, failure: AttemptFailure, reason: str, link_field: str = ""
) -> pb.TokenDelta:
    """Return the delta that ends an attempt. ``reason``: one line for the client. ``link_field``: the field
    in which prefill and decode differ, if they can never be linked."""
    return pb.TokenDelta(
        request_id=request_id,
        attempt=attempt,
        finish_reason=inference_pb2.FINISH_REASON_ERROR,
        error=reason,
        refused=failure is AttemptFailure.REFUSED,
        lost=failure is AttemptFailure.HANDOFF_LOST,
        invalid=failure is AttemptFailure.INVALID,
        expired=failure is AttemptFailure.EXPIRED,
        link_field=link_field,
    )


def failure_from_proto(delta: pb.TokenDelta) -> AttemptFailure:
    """Return how an attempt failed. Call it only for a ``delta`` with FINISH_REASON_ERROR: deltas with tokens
    are many."""
    if delta.refused:
        return AttemptFailure.REFUSED
    if delta.lost:
        return AttemptFailure.HANDOFF_LOST
    if delta.expired:
        return AttemptFailure.EXPIRED
    if delta.invalid:
        return AttemptFailure.INVALID
    return AttemptFailure.WORKER_ERROR
