"""A scanner that follows a JSON object character by character."""

from __future__ import annotations

import enum
import re

MAX_DEPTH = 64
"""Deepest nesting of objects and arrays; deeper ones count as malformed, as in many decoders."""
MAX_SCALAR = 1024
"""Most characters of a number; longer ones count as malformed."""

_SPACE = frozenset(" \t\n\r")
_ESCAPABLE = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")
_SCALAR_START = frozenset("-0123456789tfn")
_SCALAR_CHARACTERS = frozenset("+-.0123456789eEtrufalsn")
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')


def skip_string(text: str, start: int) -> int:
    """Return where in ``text`` the plain characters of a string end, none of which changes what a scanner
    expects."""
    plain = _PLAIN.match(text, start)
    return start if plain is None else plain.end()


class Expect(enum.Enum):
    """The input that may come next."""

    OBJECT = enum.auto()
    VALUE = enum.auto()
    FIRST_ITEM = enum.auto()
    FIRST_KEY = enum.auto()
    KEY = enum.auto()
    COLON = enum.auto()
    NEXT = enum.auto()
    """The input after a value: a comma, or the end of the enclosing object or array."""
    STRING = enum.auto()
    ESCAPE = enum.auto()
    HEX = enum.auto()
    SCALAR = enum.auto()
    NOTHING = enum.auto()


class JsonScanner:
    """Accepts one JSON object (RFC 8259) a character at a time, and rejects it at the first character that
    cannot be part of one."""

    __slots__ = ("_hex_left", "_in_key", "_open", "_scalar", "expect")

    def __init__(self) -> None:
        self.expect = Expect.OBJECT
        self._open: list[str] = []
        self._in_key = False
        self._hex_left = 0
        self._scalar = ""

    @property
    def depth(self) -> int:
        """The number of open objects and arrays."""
        return len(self._open)

    @property
    def done(self) -> bool:
        return self.expect is Expect.NOTHING

    def push(self, character: str) -> bool:
        """Take a character; return False if no JSON object begins so. Nothing more may be pushed then."""
        expect = self.expect
        if expect is Expect.STRING:
            return self._in_string(character)
        if expect is Expect.SCALAR:
            if character in _SCALAR_CHARACTERS:
                self._scalar += character
                return len(self._scalar) <= MAX_SCALAR
            if not _SCALAR.fullmatch(self._scalar):
                return False
            self.expect = expect = Expect.NEXT  # the current character follows the scalar
        if expect is Expect.ESCAPE or expect is Expect.HEX:
            return self._in_escape(character)
        return character in _SPACE or self._structure(character)

    def _structure(self, character: str) -> bool:
        match self.expect:
            case Expect.OBJECT:
                return character == "{" and self._enter(character)
            case Expect.VALUE:
                return self._value(character)
            case Expect.FIRST_ITEM:
                return self._leave(character) if character == "]" else self._value(character)
            case Expect.FIRST_KEY | Expect.KEY:
                if character == "}" and self.expect is Expect.FIRST_KEY:
                    return self._leave(character)
                return character == '"' and self._begin_string(in_key=True)
            case Expect.COLON:
                self.expect = Expect.VALUE
                return character == ":"
            case Expect.NEXT:
                if character != ",":
                    return self._leave(character)
                self.expect = Expect.KEY if self._open[-1] == "{" else Expect.VALUE
                return True
        return False

    def _value(self, character: str) -> bool:
        if character == '"':
            return self._begin_string(in_key=False)
        if character in ("{", "["):
            return self._enter(character)
        self._scalar = character
        self.expect = Expect.SCALAR
        return character in _SCALAR_START

    def _enter(self, character: str) -> bool:
        self._open.append(character)
        self.expect = Expect.FIRST_KEY if character == "{" else Expect.FIRST_ITEM
        return len(self._open) <= MAX_DEPTH

    def _leave(self, character: str) -> bool:
        if character != ("}" if self._open.pop() == "{" else "]"):
            return False
        self.expect = Expect.NEXT if self._open else Expect.NOTHING
        return True

    def _begin_string(self, *, in_key: bool) -> bool:
        self._in_key = in_key
        self.expect = Expect.STRING
        return True

    def _in_string(self, character: str) -> bool:
        if character == '"':
            self.expect = Expect.COLON if self._in_key else Expect.NEXT
        elif character == "\\":
            self.expect = Expect.ESCAPE
        return character >= " "

    def _in_escape(self, character: str) -> bool:
        if self.expect is Expect.HEX:
            self._hex_left -= 1
            self.expect = Expect.HEX if self._hex_left else Expect.STRING
            return character in _HEX
        if character == "u":
            self._hex_left = 4
            self.expect = Expect.HEX
            return True
        self.expect = Expect.STRING
        return character in _ESCAPABLE
