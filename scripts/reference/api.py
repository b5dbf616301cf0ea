"""The reference of the APIs: HTTP from the router's OpenAPI document, gRPC from its contract."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from baton.core.priority import Priority
from baton.hub import DEMO, resolve_model
from baton.router.api.http.app import create_app
from baton.router.dispatch.types import Request, RingError
from baton.text.choice import TokenChunk
from baton.text.tokenizer import Tokenizer
from scripts.reference.markdown import code, plain, prose, table
from scripts.site.pages import ROOT

HEAD = """\
# HTTP and gRPC

Every path with the fields of its body, as the router's `/openapi.json` has them, and the contract of the gRPC
API. [The APIs](../api.md) says what they mean, [sampling](../sampling.md) has the ranges, and
[request fields](fields.md) what becomes of each of vLLM's.
"""
CONTRACT = ROOT / "proto/baton/v1/inference.proto"

Schema = Mapping[str, Any]


class NobodysRing:
    """A ring without workers, in front of which an application can be made and described."""

    model = None
    ready = False
    stale = False

    def unlinked_pairs(self) -> Mapping[str, int]:
        """Return none."""
        return {}

    def generate(
        self, prompt_ids: list[int], requests: Sequence[Request], priority: Priority
    ) -> AbstractContextManager[Sequence[AsyncGenerator[TokenChunk]]]:
        """Raise RingError."""
        raise RingError(503, "no_worker", "There are no workers.")


def page() -> str:
    """Return the page: the paths, then the schemas that their bodies refer to, then the contract."""
    document: Schema = create_app(NobodysRing(), Tokenizer.from_dir(resolve_model(DEMO))).openapi()
    schemas: Mapping[str, Schema] = document["components"]["schemas"]
    parts, bodies = [HEAD, "## Paths\n"], dict[str, list[str]]()
    rows = []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            body = operation.get("requestBody")
            name = body and body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
            if name:
                bodies.setdefault(name, []).append(path)
            said = operation.get("description", operation["summary"]).partition("\n\n")[0]
            rows.append((code(f"{method.upper()} {path}"), _link(name) if name else "", plain(said)))
    parts.append(table(("path", "body", "answer"), rows))
    parts.append("## Bodies\n")
    for name, paths in bodies.items():
        parts.append(_section(name, schemas[name], f"The body of {' and '.join(map(code, paths))}."))
    parts.append("## What bodies hold\n")
    parts += [_section(name, one, "") for name, one in sorted(schemas.items()) if name not in bodies]
    parts.append("## gRPC\n\n```proto\n" + CONTRACT.read_text(encoding="utf-8") + "```\n")
    return "\n".join(parts).rstrip() + "\n"


def _section(name: str, schema: Schema, where: str) -> str:
    said = prose(" ".join(filter(None, [schema.get("description", ""), where])))
    required = set(schema.get("required", ()))
    rows = (
        (
            code(field) + (" (required)" if field in required else ""),
            _type(one),
            plain(_said(one)),
        )
        for field, one in schema.get("properties", {}).items()
    )
    paragraphs = [f"### {name}", said, table(("field", "type", "meaning"), rows).rstrip()]
    return "\n\n".join(filter(None, paragraphs)) + "\n"


def _said(schema: Schema) -> str:
    """Return what a field's schema says, be it in the one alternative that says something."""
    either = (schema, *schema.get("anyOf", ()))
    return next((text for one in either if (text := one.get("description"))), "")


def _type(schema: Schema) -> str:
    """Return what a schema allows, in a few words; null, which every field may be, is left out."""
    match schema:
        case {"$ref": str(reference)}:
            return _link(reference.rpartition("/")[2])
        case {"anyOf": [*either]} | {"oneOf": [*either]}:
            return " or ".join(dict.fromkeys(_type(each) for each in either if each.get("type") != "null"))
        case {"enum": [*choices]}:
            return ", ".join(code(str(choice)) for choice in choices if choice is not None)
        case {"const": constant}:
            return code(str(constant))
        case {"type": "array", "items": items}:
            return f"list of {_type(items)}" if items else "list"
        case {"type": str(kind)}:
            return kind
    return "any JSON"


def _link(name: str) -> str:
    return f"[{name}](#{name.lower()})"
