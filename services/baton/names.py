"""Bounds of the names that services tell each other, before they reach memory, labels or logs. Pure."""

from __future__ import annotations

import re

from baton.options import parse_address

LONGEST_NAME = 128
"""Characters of any name."""

_NAME = re.compile(r"[!-~]{1,128}")


def is_name(text: str) -> bool:
    """Whether ``text`` can be a name: of a router, process, request, connector."""
    return _NAME.fullmatch(text) is not None


def check_name(field: str, text: str) -> None:
    """ValueError unless ``text`` is a name: 1 to 128 visible ASCII characters."""
    if not is_name(text):
        raise ValueError(f"{field}: must be 1 to {LONGEST_NAME} visible ASCII characters, not {shown(text)}")


def check_address(field: str, text: str) -> None:
    """ValueError unless ``text`` is ``host:port`` of at most 128 characters."""
    check_name(field, text)
    try:
        parse_address(text)
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from None


def is_words(text: str) -> bool:
    """Whether ``text`` can be what a person calls something: see ``check_words``."""
    return len(text) <= LONGEST_NAME and text.isprintable()


def check_words(field: str, text: str) -> None:
    """ValueError unless ``text`` can be what a person calls something, a model say: up to 128 characters that
    can be printed. It may be empty."""
    if not is_words(text):
        raise ValueError(f"{field}: must be at most {LONGEST_NAME} printable characters, not {shown(text)}")


def shown(text: str) -> str:
    """``text`` for an error or a log: in ASCII, on one line, and cut."""
    if len(text) > LONGEST_NAME:
        return f"{len(text)} characters, {text[:16]!a}..."
    return ascii(text)
