"""The OpenAPI description of bodies that are validated by msgspec rather than by FastAPI."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI

from baton.router.api.http import schemas
from baton.router.api.http.messages.fields import CountRequest, MessageRequest
from baton.router.api.http.responses.fields import ResponseRequest
from baton.router.api.http.unsupported import HARMLESS

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
    """The part of an operation that says that it takes a JSON ``body``."""
    reference = {"$ref": f"#/components/schemas/{body.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}}


def _any_json(type_: type) -> dict[str, object]:
    """The schema of a type that msgspec has none for: ``object``, which stands for any JSON value."""
    if type_ is not object:
        raise NotImplementedError
    return {"description": "Any JSON value."}


def _close(schema: dict[str, Any]) -> None:
    """Say of a body's schema that other fields are refused, but for those that never matter."""
    for name in sorted(HARMLESS):
        schema["properties"].setdefault(name, {"description": "Taken, and not acted on."})
    schema["additionalProperties"] = False


class DescribedApi(FastAPI):
    """An application whose OpenAPI document also holds the schemas of msgspec bodies."""

    def openapi(self) -> dict[str, object]:
        """The document, built once."""
        if not self.openapi_schema:
            document = super().openapi()
            _, components = msgspec.json.schema_components(
                _BODIES, ref_template="#/components/schemas/{name}", schema_hook=_any_json
            )
            for body in _BODIES:
                _close(components[body.__name__])
            document.setdefault("components", {}).setdefault("schemas", {}).update(components)
        return self.openapi_schema or {}
