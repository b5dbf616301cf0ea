"""Strategies for any protobuf message, by its descriptor, and for bytes that are nearly one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

DEEPEST = 5
ADDRESSES = ("", "x", "127.0.0.1:1", "127.0.0.1:99999", "[::1]:1", "127.0.0.1:0")
"""The values of every field with an address: a fuzzer must not make workers connect to anything else."""


def _ints(bits: int, *, signed: bool) -> st.SearchStrategy[int]:
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    return st.one_of(st.integers(0, 300), st.sampled_from([low, high, high - 1]), st.integers(low, high))


_TEXT = st.one_of(st.sampled_from(["", "demo", "r-0", "{}", "a\x00b", "🙂"]), st.text(max_size=30))
_FLOAT = st.floats(width=32) | st.sampled_from([0.0, 1.0])

_SCALARS: Mapping[int, st.SearchStrategy[object]] = MappingProxyType(
    {
        FieldDescriptor.CPPTYPE_INT32: _ints(32, signed=True),
        FieldDescriptor.CPPTYPE_INT64: _ints(64, signed=True),
        FieldDescriptor.CPPTYPE_UINT32: _ints(32, signed=False),
        FieldDescriptor.CPPTYPE_UINT64: _ints(64, signed=False),
        FieldDescriptor.CPPTYPE_DOUBLE: st.floats() | st.sampled_from([0.0, 1.0]),
        FieldDescriptor.CPPTYPE_FLOAT: _FLOAT,
        FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
        FieldDescriptor.CPPTYPE_ENUM: st.integers(0, 9),
    }
)


def _value(field: FieldDescriptor, depth: int) -> st.SearchStrategy[object]:
    if field.message_type is not None:
        return messages(field.message_type, depth + 1)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=40)
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return st.sampled_from(ADDRESSES) if "address" in field.name else _TEXT
    return _SCALARS[field.cpp_type]


@st.composite
def messages(draw: st.DrawFn, descriptor: Descriptor, depth: int = 0) -> Message:
    """Draw any message of this type, with some of its fields set."""
    message = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if (depth >= DEEPEST and field.message_type is not None) or not draw(st.booleans()):
            continue
        repeated = field.is_repeated
        if repeated and field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, value = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
            if value.message_type is None:
                getattr(message, field.name)[draw(_value(key, depth))] = draw(_value(value, depth))
            continue
        if repeated:
            given = draw(st.lists(_value(field, depth), max_size=3))
            getattr(message, field.name).extend(given)
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(draw(_value(field, depth)))
        else:
            setattr(message, field.name, draw(_value(field, depth)))
    return message


@st.composite
def frames(draw: st.DrawFn, descriptor: Descriptor, of: Callable[[Message], Message] | None = None) -> bytes:
    """Draw the bytes of a message, whole or spoiled, or of no message at all. ``of`` changes half of the
    messages."""
    if draw(st.integers(0, 5)) == 0:
        return draw(st.binary(max_size=60))
    message = draw(messages(descriptor))
    if of is not None and draw(st.booleans()):
        message = of(message)
    data = bytearray(message.SerializeToString())
    if not data or draw(st.integers(0, 2)):
        return bytes(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data) - 1))
        data[at] = draw(st.integers(0, 255))
    return bytes(data[: draw(st.integers(0, len(data)))])
