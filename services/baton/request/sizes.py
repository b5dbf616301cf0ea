"""Checks the size of a part of a request."""

from __future__ import annotations

import orjson

from baton.request.errors import invalid


def check_json_bytes(param: str, value: object, most: int) -> None:
    """Raise RequestError if the field ``param`` has more than ``most`` bytes as JSON, or cannot be written as
    JSON."""
    try:
        size = len(orjson.dumps(value))
    except TypeError:
        raise invalid(
            param, f"{param} is nested deeper than 254, or has an integer of more than 64 bits."
        ) from None
    if size > most:
        raise invalid(param, f"{param} has {size} bytes of JSON; at most {most} are allowed.")
