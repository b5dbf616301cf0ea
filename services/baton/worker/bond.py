"""Whose a beat is: what it must be bound to, to count for one stream of one router, once."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from baton.connector.identity import beat_is_valid
from baton.v1 import worker_pb2 as pb

NONCE_BYTES = 16


class BeatRefusedError(Exception):
    """A beat is not heard; ``status`` is what its sender is told, with the text."""

    def __init__(self, status: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(slots=True)
class Bond:
    """What the beats of one stream must be bound to, so that none of others and of other streams count."""

    incarnation: str
    """Of this worker, as it greeted on the stream."""
    nonce: bytes
    count: int = 0
    """Of the last beat that was heard."""

    @classmethod
    def of(cls, hello: pb.RouterHello, incarnation: str) -> Bond | None:
        """None: the router never beats. Raises ValueError for a nonce that no router draws."""
        if not hello.beat_nonce:
            return None
        if len(hello.beat_nonce) != NONCE_BYTES:
            raise ValueError(f"beat_nonce: must be {NONCE_BYTES} bytes, not {len(hello.beat_nonce)}")
        return cls(incarnation, hello.beat_nonce)

    def take(self, beat: pb.RouterBeat, cluster_key: bytes) -> None:
        """Believe a beat, once. Raises BeatRefusedError."""
        bound_to = (beat.router_id, self.incarnation, self.nonce, beat.count)
        if not beat_is_valid(beat.proof, cluster_key, *bound_to):
            raise BeatRefusedError(
                grpc.StatusCode.PERMISSION_DENIED,
                "proof: it is not this cluster's, or for another stream: is the cluster key the same?",
            )
        if beat.count <= self.count:
            raise BeatRefusedError(
                grpc.StatusCode.FAILED_PRECONDITION, f"count: must be above {self.count}, not {beat.count}"
            )
        self.count = beat.count
