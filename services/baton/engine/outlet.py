"""The interface through which tokens leave a worker."""

from __future__ import annotations

from typing import Protocol

from baton.core.attempt_failure import AttemptFailure
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

    def fail(
        self,
        owner: str,
        request_id: str,
        attempt: int,
        failure: AttemptFailure,
        reason: str,
        link_field: str = "",
    ) -> None:
        """End an attempt. ``reason``: one line, which the router may show to its client. ``link_field``: the
        field in which this worker and decode differ, if they can never be linked."""
