"""What can go wrong between a router and Redis, by a few names: metrics and logs have them."""

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
"""The code that Redis's error begins with, or which its scripts quote → our word for it."""
WORDS = frozenset(
    {*CAUSES.values(), "timeout", "connection", "lookup", "tls", "refused", "unexpected"},
)
"""All causes of a StoreError: ``readonly`` is a replica's answer (Redis has failed over), ``lookup`` a name
that leads nowhere, ``refused`` another error of Redis's, ``unexpected`` one of ours."""
LONGEST_MESSAGE = 300

_CODE = re.compile(rf"(?:^|[\s:-])({'|'.join(CAUSES)})\b")


class StoreError(Exception):
    """Redis did not do it. ``word`` is one of WORDS."""

    def __init__(self, word: str, message: str, *, unsure: bool = False) -> None:
        """``unsure``: it may have done it all the same, and the answer was late."""
        super().__init__(message)
        self.word = word
        self.unsure = unsure


def store_error(error: Exception) -> StoreError:
    """What ``error``, whatever it is, means for whoever asked Redis."""
    text = " ".join(str(error).split()) or type(error).__name__
    word = cause_of(error)
    if word == "unexpected":
        text = f"{type(error).__name__}: {text}"
    return StoreError(word, text[:LONGEST_MESSAGE])


def cause_of(error: Exception) -> str:
    """One of WORDS."""
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
    # The client has its own error for one of the system's, which is its cause or its context.
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
