"""Secrets as Kubernetes' own clients write them: protobuf in an envelope. Helm keeps its records so."""

from __future__ import annotations

import base64
from collections import defaultdict
from typing import Any

MAGIC = b"k8s\0"

# Numbers of fields: of the envelope, of a Secret, of its metadata, and of an entry of a map.
_RAW = 2
_METADATA, _DATA, _TYPE = 1, 2, 3
_NAME, _NAMESPACE, _LABELS, _ANNOTATIONS = 1, 3, 11, 12
_KEY, _VALUE = 1, 2


def secret_of(body: bytes) -> dict[str, Any]:
    """The Secret in ``body``, as JSON has it."""
    fields = _fields(_fields(body.removeprefix(MAGIC))[_RAW][0])
    metadata = _fields(fields[_METADATA][0])
    told: dict[str, Any] = {
        "name": metadata[_NAME][0].decode(),
        "labels": {key: value.decode() for key, value in _entries(metadata[_LABELS]).items()},
        "annotations": {key: value.decode() for key, value in _entries(metadata[_ANNOTATIONS]).items()},
    }
    data = {key: base64.b64encode(value).decode() for key, value in _entries(fields[_DATA]).items()}
    return {"metadata": told, "data": data, "type": fields[_TYPE][0].decode()}


def _entries(maps: list[bytes]) -> dict[str, bytes]:
    found = {}
    for each in maps:
        entry = _fields(each)
        found[entry[_KEY][0].decode()] = entry[_VALUE][0] if entry[_VALUE] else b""
    return found


def _fields(message: bytes) -> defaultdict[int, list[bytes]]:
    """The fields of ``message`` that have a length, by number; numbers are left out."""
    found: defaultdict[int, list[bytes]] = defaultdict(list)
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        size, at = _varint(message, at)
        if tag & 7 == 2:
            found[tag >> 3].append(message[at : at + size])
            at += size
    return found


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at
