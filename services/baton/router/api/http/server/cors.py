"""Cross-origin access: which pages of other origins may use the API from a browser."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from baton.router.api.ignored import HEADER as IGNORED

_TOLD = (
    "x-request-id",
    "x-baton-request-id",
    "traceresponse",
    "server-timing",
    "retry-after",
    "x-should-retry",
    IGNORED,
    *(
        f"x-ratelimit-{what}-{of}"
        for what in ("limit", "remaining", "reset")
        for of in ("requests", "tokens")
    ),
)
"""The headers of answers that a page may read."""


@dataclass(frozen=True, slots=True)
class Cors:
    """What pages of other origins may do. ``*`` stands for any; without origins, no such page may do
    anything."""

    origins: tuple[str, ...] = ()
    credentials: bool = False
    methods: tuple[str, ...] = ("*",)
    headers: tuple[str, ...] = ("*",)


def add_cors(app: FastAPI, cors: Cors) -> None:
    """Let ``app`` answer browsers' preflight requests before all else: they have no keys."""
    if cors.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=cors.origins,
            allow_credentials=cors.credentials,
            allow_methods=cors.methods,
            allow_headers=cors.headers,
            expose_headers=_TOLD,
        )
