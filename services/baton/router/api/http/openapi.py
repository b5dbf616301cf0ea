"""The OpenAPI description of bodies that are validated by msgspec rather than by FastAPI."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from baton.router.api.http.anthropic.fields import CountRequest, MessageRequest
from baton.router.api.http.openai import schemas
from baton.router.api.http.responses.fields import ResponseRequest
from baton.router.api.http.server.unsupported import HARMLESS

_BODIES = (
    schemas.CompletionRequest,
    schemas.ChatRequest,
    schemas.TokenizeRequest,
    schemas.DetokenizeRequest,
    ResponseRequest,
    MessageRequest,
    CountRequest,
)


def takes(body: type[msgspec.Struct]) -> dict[str, object]:
    """Return the part of an operation that says that it takes a JSON ``body``."""
    reference = {"$ref": f"#/components/schemas/{body.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}}


def _any_json(type_: type) -> dict[str, object]:
    """Return the schema of ``object``, which stands for any JSON value and which msgspec has no schema
    for."""
    if type_ is not object:
        raise NotImplementedError
    return {"description": "Any JSON value."}


def _close(schema: dict[str, Any]) -> None:
    """State in a body's schema that other fields are refused, except for those that never matter."""
    for name in sorted(HARMLESS):
        schema["properties"].setdefault(name, {"description": "Taken, and not acted on."})
    schema["additionalProperties"] = False


class PlainRoute(APIRoute):
    """A route whose endpoint takes the request and returns the response, as Starlette's do. FastAPI describes
    the route, and resolves no dependencies at each request."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the endpoint itself."""
        return self.endpoint


class DescribedApi(FastAPI):
    """An application of plain routes, whose OpenAPI document also holds the schemas of msgspec bodies."""

    def __init__(self, *, title: str, version: str, summary: str) -> None:
        # FastAPI's pages would load their scripts from another host.
        super().__init__(title=title, version=version, summary=summary, docs_url=None, redoc_url=None)
        self.router.route_class = PlainRoute

    def openapi(self) -> dict[str, object]:
        """Return the document, which is built once."""
        if not self.openapi_schema:
            document = super().openapi()
            _, components = msgspec.json.schema_components(
                _BODIES, ref_template="#/components/schemas/{name}", schema_hook=_any_json
            )
            for body in _BODIES:
                _close(components[body.__name__])
            document.setdefault("components", {}).setdefault("schemas", {}).update(components)
        return self.openapi_schema or {}
