"""What clients talk to: a core that completes prompts, with HTTP in front (``router.grpc_api`` is gRPC)."""

from __future__ import annotations

from baton.router.api.http.app import create_app
from baton.router.api.settings import ApiSettings

__all__ = ["ApiSettings", "create_app"]
