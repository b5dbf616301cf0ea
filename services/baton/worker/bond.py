"""The binding of a beat to one stream of one router, for which it counts once."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from baton.greeting.cluster_key import ClusterKeys
from baton.handoff.identity import beat_is_valid
from baton.v1 import worker_pb2 as pb

NONCE_BYTES = 16


class BeatRefusedError(Exception):
    """A beat is refused. ``status`` and the text are sent to its sender."""

    def __init__(self, status: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(slots=True)
class Bond:
    """What the beats of one stream are bound to, so that no beat of another router or stream counts."""

    incarnation: str
    """The incarnation of this worker, as it greeted on the stream."""
    nonce: bytes
    count: int = 0
    """The count of the last beat accepted."""

    @classmethod
    def of(cls, hello: pb.RouterHello, incarnation: str) -> Bond | None:
        """Return the bond of a router's stream, or None if the router never beats. Raises ValueError for a
        nonce of the wrong length."""
        if not hello.beat_nonce:
            return None
        if len(hello.beat_nonce) != NONCE_BYTES:
            raise ValueError(f"beat_nonce: must be {NONCE_BYTES} bytes, not {len(hello.beat_nonce)}")
        return cls(incarnation, hello.beat_nonce)

    def take(self, beat: pb.RouterBeat, keys: ClusterKeys) -> None:
        """Accept a beat, once. Raises BeatRefusedError."""
        bound_to = (beat.router_id, self.incarnation, self.nonce, beat.count)
        if not beat_is_valid(beat.proof, keys, *bound_to):
            raise BeatRefusedError(
                grpc.StatusCode.PERMISSION_DENIED,
                "proof: it is not this cluster's, or for another stream: is the cluster key the same?",
            )
        if beat.count <= self.count:
            raise BeatRefusedError(
                grpc.StatusCode.FAILED_PRECONDITION, f"count: must be above {self.count}, not {beat.count}"
            )
        self.count = beat.count
