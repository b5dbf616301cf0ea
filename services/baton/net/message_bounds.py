"""Bounds of what a serialized protobuf message may hold, checked before it is parsed.

A message of 8 MiB can hold millions of empty messages, which take thirteen times its size when parsed, and
block the event loop meanwhile. The check reads tags alone and stops at the bound.
"""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_TEXT = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


@dataclass(frozen=True, slots=True)
class MessageBounds:
    """The bounds of one message."""

    fields: int = 16_384
    """Most fields of the message and the messages in it, one for each entry of a list. A message with all
    that the API allows in its lists has about 5,000."""
    packed_bytes: int = 4 << 20
    """Most bytes of one list of numbers: over a million token ids."""


def check_bounds(message: bytes, descriptor: Descriptor, bounds: MessageBounds) -> None:
    """Raise DecodeError for a message of type ``descriptor`` that holds more than ``bounds`` allow. The error
    names a list that is too long. Bytes that are no message are left to the parser."""
    left = bounds.fields
    inside: list[tuple[Descriptor, int, int]] = [(descriptor, 0, len(message))]
    try:
        while inside:
            of, at, end = inside.pop()
            while at < end:
                left -= 1
                if left < 0:
                    raise DecodeError(f"it has more than {bounds.fields} fields and entries of lists")
                tag, at = _varint(message, at)
                kind = tag & 7
                if kind == _VARINT:
                    _, at = _varint(message, at)
                elif kind == _FIXED64:
                    at += 8
                elif kind == _FIXED32:
                    at += 4
                elif kind == _BYTES:
                    size, at = _varint(message, at)
                    field = of.fields_by_number.get(tag >> 3)
                    if field is not None and field.message_type is not None:
                        inside.append((field.message_type, at, min(at + size, end)))
                    elif field is not None and field.type not in _TEXT and size > bounds.packed_bytes:
                        raise DecodeError(
                            f"{field.name} has {size} bytes; at most {bounds.packed_bytes} are allowed"
                        )
                    at += size
                else:
                    return  # groups, which no message here has: the parser refuses them
    except IndexError:
        return  # truncated: the parser refuses it


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number that begins at ``at``, and where it ends. Raises IndexError."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise IndexError
