"""The reader of one call as models write it: a JSON object with a name and an object of arguments."""

from __future__ import annotations

import json
from collections.abc import Set

from baton.tools.json_scanner import Expect, JsonScanner, skip_string

_AFTER_VALUE = frozenset({Expect.NEXT, Expect.KEY, Expect.NOTHING})


class CallReader:
    """Reads ``{"name": …, "arguments": {…}}`` as it arrives, its keys in any order.

    The reader breaks at the first character that no such object can have there: malformed JSON, a name that
    is not among ``names``, arguments that are no object, a key that comes twice. Other keys are skipped.
    """

    def __init__(self, names: Set[str], argument_keys: Set[str]) -> None:
        self._names = names
        self._argument_keys = argument_keys
        self._scanner = JsonScanner()
        self._key: str | None = None
        self._seen: set[str] = set()
        self._string: list[str] = []  # of the outer object: the key or name being read
        self._in_value = False
        self._in_arguments = False
        self._untold: list[str] = []
        self.name: str | None = None
        self.begun = False
        """Whether the arguments have begun."""
        self.done = False
        self.broken = False

    def push(self, text: str) -> int:
        """Take text; return how many characters were taken: all, unless the object ends or breaks there."""
        position = 0
        while position < len(text):
            if self._scanner.expect is Expect.STRING:
                end = skip_string(text, position)
                self._keep(text[position:end])
                position = end
                if position == len(text):
                    break
            if not self._take(text[position]):
                self.broken = True
                break
            position += 1
            if self._scanner.done:
                self.done = self.name is not None and self.begun
                self.broken = not self.done
                break
        return position

    def take_arguments(self) -> str:
        """Return the part of the arguments that was read since the last call."""
        text = "".join(self._untold)
        self._untold.clear()
        return text

    def _take(self, character: str) -> bool:
        scanner = self._scanner
        before, outer = scanner.expect, scanner.depth == 1
        if not scanner.push(character):
            return False
        if outer and before is Expect.VALUE and scanner.expect is not Expect.VALUE:
            if not self._begin_value(character):
                return False
        elif outer and before in (Expect.KEY, Expect.FIRST_KEY) and scanner.expect is Expect.STRING:
            self._string.clear()
        self._keep(character)
        if scanner.depth == 1 and before is Expect.STRING and scanner.expect is Expect.COLON:
            return self._end_key()
        if self._in_value and scanner.depth <= 1 and scanner.expect in _AFTER_VALUE:
            return self._end_value()
        return True

    def _keep(self, text: str) -> None:
        if self._in_arguments:
            self._untold.append(text)
        elif self._scanner.depth == 1:
            self._string.append(text)

    def _begin_value(self, character: str) -> bool:
        self._in_value = True
        self._string.clear()
        if self._key == "name":
            return character == '"'
        if self._key in self._argument_keys:
            self._in_arguments = self.begun = True
            return character == "{"
        return True

    def _end_key(self) -> bool:
        key: str = json.loads("".join(self._string))
        kind = "arguments" if key in self._argument_keys else key
        self._key = key
        if kind in self._seen:
            return False
        self._seen.add(kind)
        return True

    def _end_value(self) -> bool:
        self._in_value = self._in_arguments = False
        if self._key != "name":
            return True
        name: str = json.loads("".join(self._string))
        self.name = name
        return name in self._names
