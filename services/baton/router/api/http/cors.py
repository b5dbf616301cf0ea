"""Which pages of other origins may use the API from a browser."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

_TOLD = (
    "x-request-id",
    "x-baton-request-id",
    "traceresponse",
    "server-timing",
    "retry-after",
    "x-should-retry",
    *(
        f"x-ratelimit-{what}-{of}"
        for what in ("limit", "remaining", "reset")
        for of in ("requests", "tokens")
    ),
)
"""Headers of answers that a page may read."""


@dataclass(frozen=True, slots=True)
class Cors:
    """``*`` is any. No origins: no page of another origin."""

    origins: tuple[str, ...] = ()
    credentials: bool = False
    methods: tuple[str, ...] = ("*",)
    headers: tuple[str, ...] = ("*",)


def add_cors(app: FastAPI, cors: Cors) -> None:
    """Let ``app`` answer browsers' questions, before anything else sees them: they come without keys."""
    if cors.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=cors.origins,
            allow_credentials=cors.credentials,
            allow_methods=cors.methods,
            allow_headers=cors.headers,
            expose_headers=_TOLD,
        )
