"""Bodies of very many values are refused before they are decoded: they would take thirty times as much."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest

from baton.router.api.errors import RequestError
from baton.router.api.http.preparing.kinds import KINDS
from baton.router.api.http.server.decode import decode
from baton.router.api.http.server.values import MAX_CONTAINERS, MAX_STRINGS, check_values

MIB = 1 << 20
OPENED, STRING = b"[", b'"a"'


@pytest.mark.parametrize("opening", [b"[", b"{"])
def test_lists_and_objects_are_counted_outside_of_strings(opening: bytes) -> None:
    text = b'"' + b'{[\\"[\\\\' * MAX_CONTAINERS + b'",'
    check_values(text + opening * MAX_CONTAINERS)
    with pytest.raises(RequestError, match="more than 262144 lists and objects") as told:
        check_values(text + opening * (MAX_CONTAINERS + 1))
    assert told.value.code == "request_too_complex"


def test_strings_are_counted_whatever_is_in_them() -> None:
    quoted = b'"' + b'\\"' * (2 * MAX_STRINGS) + b'",'
    check_values(quoted + STRING * (MAX_STRINGS - 1))
    with pytest.raises(RequestError, match="more than 1048576 strings"):
        check_values(quoted + STRING * MAX_STRINGS)


@pytest.mark.parametrize(
    "piece",
    [b'\\"', b'"', b"\\", b'"\\', b'\\""', b"\n"],
    ids=["escaped", "quote", "slash", "cut", "odd", "line"],
)
def test_what_is_no_json_takes_no_longer(piece: bytes) -> None:
    body = b"[" * (MAX_CONTAINERS - 1) + b'"' + piece * (8 * MIB // len(piece)) + b"[["
    began = time.thread_time()
    with suppress(RequestError):
        check_values(body)
    assert time.thread_time() - began < 5


def test_a_body_is_counted_before_it_is_decoded() -> None:
    with pytest.raises(RequestError, match="lists and objects"):
        decode(b"[" * (MAX_CONTAINERS + 1), KINDS["completion"], frozenset())
