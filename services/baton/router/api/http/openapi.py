"""The OpenAPI description of bodies that are validated by msgspec rather than by FastAPI."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from baton.router.api.http.preparing.kinds import KINDS
from baton.router.api.http.server.field_rules import EVERYWHERE, BodyKind

_KINDS = tuple(kind for kind in KINDS.values() if kind.path)
_BODIES = tuple(kind.type for kind in _KINDS)


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


def _describe_ignored(schema: dict[str, Any], kind: BodyKind) -> None:
    """State in a body's schema which fields are ignored; those that nobody knows are too."""
    for name in sorted(EVERYWHERE.keys() | kind.own.keys() if kind.generates else kind.own):
        rule = kind.rule(name, frozenset())
        if rule is not None and rule.verdict == "ignored":
            schema["properties"].setdefault(name, {"description": f"Ignored: {rule.why}."})


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
            for kind in _KINDS:
                _describe_ignored(components[kind.type.__name__], kind)
            document.setdefault("components", {}).setdefault("schemas", {}).update(components)
        return self.openapi_schema or {}
