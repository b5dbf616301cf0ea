"""What clients talk to: a core that completes prompts, with HTTP in front (``router.grpc_api`` is gRPC)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.router.api.settings import ApiSettings

if TYPE_CHECKING:
    from baton.router.api.http.app import create_app

__all__ = ["ApiSettings", "create_app"]


def __getattr__(name: str) -> object:
    """``create_app`` is imported when it is asked for: whoever only reads bodies needs no web server."""
    if name == "create_app":
        from baton.router.api.http.app import create_app

        return create_app
    raise AttributeError(name)
