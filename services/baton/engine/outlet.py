"""Where tokens leave a worker."""

from __future__ import annotations

from typing import Protocol

from baton.v1 import worker_pb2 as pb


class Outlet(Protocol):
    """The streams to the routers, as the roles see them. Never blocks."""

    def connected(self, owner: str) -> bool:
        """Whether the router ``owner`` has a stream to this worker now."""

    def deliver(self, owner: str, delta: pb.TokenDelta) -> None:
        """Put ``delta`` into the next frame to the router ``owner``; dropped when that router is gone."""

    def tell_phases(self, owner: str, phases: pb.Phases) -> None:
        """Put ``phases`` into the next frame to the router ``owner``, with the deltas of this turn of the
        event loop; dropped when that router is gone."""

    def fail(self, owner: str, request_id: str, attempt: int, reason: str) -> None:
        """End an attempt with an error that the router may show to its client."""

    def refuse(self, owner: str, request_id: str, attempt: int, reason: str) -> None:
        """End an attempt of which nothing was begun here: the router may ask another worker."""

    def expire(self, owner: str, request_id: str, attempt: int) -> None:
        """End a request whose deadline has passed."""

    def lose(self, owner: str, request_id: str, attempt: int, reason: str) -> None:
        """End an attempt whose handoff broke: the router may go on from the tokens delivered."""
