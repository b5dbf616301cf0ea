"""The decoding of a body to its fields: JSON, strictly typed, with errors that name the field."""

from __future__ import annotations

import re
from collections.abc import Set
from typing import NamedTuple

import msgspec

from baton.request.errors import in_short
from baton.router.api.errors import RequestError, invalid, shown
from baton.router.api.http.server.field_rules import BodyKind, check_fields
from baton.router.api.http.server.values import check_values
from baton.text.config import Json

_MISSING = re.compile(r"Object missing required field `(.+)`")
_STEP = re.compile(r"\.([^.\[\]]+)|\[([0-9]{1,9})\]")


class Decoded(NamedTuple):
    """A body that is decoded."""

    fields: msgspec.Struct
    ignored: list[str]
    """The fields that were given and are not acted on."""


def decode(body: bytes, kind: BodyKind, elsewhere: Set[str]) -> Decoded:
    """Return ``body`` as one of ``kind``; see `check_fields`. A number may be a text, or have a fraction of
    zero where an integer is meant, as in vLLM. Raises RequestError for anything that the endpoint does not
    take."""
    if not body.strip():
        raise invalid(None, "The request has no body; it must be a JSON object.", "invalid_json")
    check_values(body)
    try:
        # The first decoding is untyped, so that an error can show the value that was sent.
        document: Json = msgspec.json.decode(body)
    except RecursionError:
        raise invalid(None, "The body is nested too deeply.", "invalid_json") from None
    except UnicodeDecodeError as error:
        raise invalid(None, f"The body is not UTF-8: {error.reason}.", "invalid_json") from None
    except ValueError as error:
        raise invalid(None, f"The body is not valid JSON: {error}.", "invalid_json") from None
    if not isinstance(document, dict):
        raise invalid(None, f"The body must be a JSON object, not {shown(document)}.", "invalid_type")
    ignored = check_fields(document, kind, elsewhere)
    return Decoded(_converted(document, kind.type), ignored)


def _converted(document: Json, type_: type[msgspec.Struct]) -> msgspec.Struct:
    try:
        return msgspec.convert(document, type_)
    except msgspec.ValidationError:
        pass  # most bodies have numbers as numbers; the others are read again
    try:
        return msgspec.convert(document, type_, strict=False)
    except msgspec.ValidationError as error:
        raise _type_error(str(error), document) from None


def _type_error(message: str, document: Json) -> RequestError:
    """Return the error for msgspec's ``message``, which may quote a name that the client has chosen: its end
    says where."""
    problem, located, path = message.rpartition(" - at `$")
    if not located:
        problem, path = message, "`"
    path = path.removesuffix("`").removesuffix("[...]")  # an entry of a mapping, whose key is not told
    missing = _MISSING.fullmatch(problem)
    if missing:
        param = f"{path}.{missing[1]}".removeprefix(".")
        return invalid(param, f"{param} is required.", "missing_required_parameter")
    param = path.removeprefix(".")
    problem = in_short(problem[:1].lower() + problem[1:].replace("`", ""))
    return invalid(param or None, f"{param}: {problem} ({_shown_at(document, path)}).", "invalid_type")


def _shown_at(document: Json, path: str) -> str:
    """Return the value at ``path``, in the notation of msgspec's errors, to show; … if there is none."""
    value = document
    end = 0
    for step in _STEP.finditer(path):
        name, index = step.groups()
        if step.start() != end:
            return "…"
        end = step.end()
        if name and isinstance(value, dict) and name in value:
            value = value[name]
        elif index and isinstance(value, list) and int(index) < len(value):
            value = value[int(index)]
        else:
            return "…"
    return shown(value) if end == len(path) else "…"
