"""The causes of failures between a router and Redis, as a few words for metrics and logs."""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Iterator, Mapping
from types import MappingProxyType

CAUSES: Mapping[str, str] = MappingProxyType(
    {
        "READONLY": "readonly",
        "MASTERDOWN": "readonly",
        "LOADING": "loading",
        "CLUSTERDOWN": "cluster",
        "MOVED": "cluster",
        "ASK": "cluster",
        "NOAUTH": "credentials",
        "WRONGPASS": "credentials",
        "NOPERM": "permission",
        "OOM": "full",
    }
)
"""Code at the beginning of Redis's error, or quoted by its scripts → our word for the cause."""
WORDS = frozenset(
    {*CAUSES.values(), "timeout", "connection", "lookup", "tls", "refused", "unexpected"},
)
"""All causes of a StoreError: ``readonly`` is a replica's answer (Redis has failed over), ``lookup`` a host
name without an address, ``refused`` any other error of Redis, ``unexpected`` an error of ours."""
MAX_MESSAGE = 300

_CODE = re.compile(rf"(?:^|[\s:-])({'|'.join(CAUSES)})\b")


class StoreError(Exception):
    """A call of Redis failed. ``word`` is one of WORDS."""

    def __init__(self, word: str, message: str, *, unsure: bool = False) -> None:
        """``unsure``: Redis may have run the call all the same, and answered late."""
        super().__init__(message)
        self.word = word
        self.unsure = unsure


def store_error(error: Exception) -> StoreError:
    """Return the StoreError for any ``error`` of a call of Redis."""
    text = " ".join(str(error).split()) or type(error).__name__
    word = cause_of(error)
    if word == "unexpected":
        text = f"{type(error).__name__}: {text}"
    return StoreError(word, text[:MAX_MESSAGE])


def cause_of(error: Exception) -> str:
    """Return the cause of ``error``, one of WORDS."""
    from redis import exceptions

    by_type: tuple[tuple[type[BaseException], str], ...] = (
        (exceptions.AuthenticationError, "credentials"),
        (exceptions.NoPermissionError, "permission"),
        (exceptions.ReadOnlyError, "readonly"),
        (exceptions.MasterDownError, "readonly"),
        (exceptions.BusyLoadingError, "loading"),
        (exceptions.ClusterDownError, "cluster"),
        (exceptions.AskError, "cluster"),  # and MovedError, which is one
        (exceptions.OutOfMemoryError, "full"),
        (TimeoutError, "timeout"),
        (exceptions.TimeoutError, "timeout"),
        (socket.gaierror, "lookup"),
        (ssl.SSLError, "tls"),
    )
    # The client wraps an error of the system in its own, with the system's as its cause or context.
    for each in _chain(error):
        for kind, word in by_type:
            if isinstance(each, kind):
                return word
    if isinstance(error, exceptions.ConnectionError | OSError):
        return "tls" if "[SSL" in str(error) else "connection"  # the client may keep the text alone
    if isinstance(error, exceptions.RedisError):
        code = _CODE.search(str(error))
        return "refused" if code is None else CAUSES[code.group(1)]
    return "unexpected"


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
