"""Checks of the names that services send each other, before these reach memory, labels or logs. Pure."""

from __future__ import annotations

import re

from baton.process.options import parse_address

MAX_NAME = 128
"""Most characters of a name."""

_NAME = re.compile(r"[!-~]{1,128}")


def is_name(text: str) -> bool:
    """Whether ``text`` can be the name of a router, process, request or connector."""
    return _NAME.fullmatch(text) is not None


def check_name(field: str, text: str) -> None:
    """Raises ValueError unless ``text`` is a name: 1 to 128 visible ASCII characters."""
    if not is_name(text):
        raise ValueError(f"{field}: must be 1 to {MAX_NAME} visible ASCII characters, not {shown(text)}")


def check_address(field: str, text: str) -> None:
    """Raises ValueError unless ``text`` is ``host:port`` of at most 128 characters."""
    check_name(field, text)
    try:
        parse_address(text)
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from None


def is_words(text: str) -> bool:
    """Whether ``text`` can be a name given by a person: see ``check_words``."""
    return len(text) <= MAX_NAME and text.isprintable()


def check_words(field: str, text: str) -> None:
    """Raises ValueError unless ``text`` can be a name given by a person, as to a model: up to 128 printable
    characters. It may be empty."""
    if not is_words(text):
        raise ValueError(f"{field}: must be at most {MAX_NAME} printable characters, not {shown(text)}")


def shown(text: str) -> str:
    """Return ``text`` for an error or a log: in ASCII, on one line, and shortened."""
    if len(text) > MAX_NAME:
        return f"{len(text)} characters, {text[:16]!a}..."
    return ascii(text)
