"""JSON schemas of growing depth. All strings, numbers and arrays are bounded, or a random model would wander
in them for ever."""

from __future__ import annotations

import random
from typing import TypeAlias

Schema: TypeAlias = dict[str, object]

NAMES = ("name", "age", "city", "tags", "items", "note", "x", "naïve key", 'quo"ted')


def schema_of_depth(depth: int, rng: random.Random) -> Schema:
    """One whose objects and arrays are nested ``depth`` deep at most. A quarter allows spaces."""
    schema = _any(depth, rng)
    if rng.random() < 0.2:
        schema = {
            "$defs": {"part": schema},
            "type": "array",
            "maxItems": 2,
            "items": {"$ref": "#/$defs/part"},
        }
    return schema if rng.random() < 0.25 else {"x-guidance": {"whitespace_flexible": False}, **schema}


def _any(depth: int, rng: random.Random) -> Schema:
    if depth == 0:
        return _leaf(rng)
    kind = rng.randrange(4)
    if kind == 0:
        return {"type": "array", "items": _any(depth - 1, rng), "minItems": rng.randrange(2), "maxItems": 3}
    if kind == 1:
        return {"anyOf": [_any(depth - 1, rng), _leaf(rng)]}
    names = rng.sample(NAMES, rng.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: _any(depth - 1 if i == 0 else 0, rng) for i, name in enumerate(names)},
        "required": names[: rng.randint(1, len(names))],
        "additionalProperties": False,
    }


def _leaf(rng: random.Random) -> Schema:
    leaves: tuple[Schema, ...] = (
        {"type": "string", "maxLength": 12},
        {"type": "string", "minLength": 2, "maxLength": 6},
        {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"},
        {"type": "string", "format": "uuid"},
        {"type": "integer", "minimum": -50, "maximum": 150},
        {"enum": [0.5, -1.25, 3e4]},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": ["red", "green", 7, None, {"a": [1]}]},
        {"const": "fixed 🙂"},
        {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
    )
    return rng.choice(leaves)
