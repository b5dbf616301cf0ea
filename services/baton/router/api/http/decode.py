"""From the bytes of a body to its fields: JSON, strictly typed, with errors that name the field."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from baton.request.errors import in_short
from baton.router.api.errors import RequestError, invalid, shown
from baton.router.api.http.unsupported import refuse_unsupported
from baton.text.config import Json

Body = TypeVar("Body", bound=msgspec.Struct)

_LOCATED = re.compile(r"(?P<problem>.*?)(?: - at `\$(?P<path>.*)`)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.+)`")
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d{1,9})\]")


def decode(body: bytes, type_: type[Body], *, ignore_unknown: bool = False) -> Body:
    """``body`` as ``type_``. Raises RequestError for anything that is not what the endpoint takes."""
    if not body.strip():
        raise invalid(None, "The request has no body; it must be a JSON object.", "invalid_json")
    try:
        # First without types, so that an error can show the value that was sent.
        document: Json = msgspec.json.decode(body)
    except RecursionError:
        raise invalid(None, "The body is nested too deeply.", "invalid_json") from None
    except UnicodeDecodeError as error:
        raise invalid(None, f"The body is not UTF-8: {error.reason}.", "invalid_json") from None
    except ValueError as error:
        raise invalid(None, f"The body is not valid JSON: {error}.", "invalid_json") from None
    if not isinstance(document, dict):
        raise invalid(None, f"The body must be a JSON object, not {shown(document)}.", "invalid_type")
    refuse_unsupported(document, type_.__struct_fields__, ignore_unknown=ignore_unknown)
    try:
        return msgspec.convert(document, type_)
    except msgspec.ValidationError as error:
        raise _type_error(str(error), document) from None


def _type_error(message: str, document: Json) -> RequestError:
    located = _LOCATED.fullmatch(message)
    problem, path = (located["problem"], located["path"] or "") if located else (message, "")
    path = path.removesuffix("[...]")  # an entry of a mapping, which is not told
    missing = _MISSING.fullmatch(problem)
    if missing:
        param = f"{path}.{missing[1]}".removeprefix(".")
        return invalid(param, f"{param} is required.", "missing_required_parameter")
    param = path.removeprefix(".")
    problem = in_short(problem[:1].lower() + problem[1:].replace("`", ""))
    return invalid(param or None, f"{param}: {problem} ({shown(_at(document, path))}).", "invalid_type")


def _at(document: Json, path: str) -> Json:
    """The value at ``path``, in the notation of msgspec's errors; None where there is none, since a name that
    a client made up may read like a path."""
    value = document
    for name, index in _STEP.findall(path):
        if isinstance(value, dict) and name:
            value = value.get(name)
        elif isinstance(value, list) and index:
            value = value[int(index)] if int(index) < len(value) else None
    return value
