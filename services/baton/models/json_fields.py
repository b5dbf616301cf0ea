"""Typed access to the fields of a JSON object. Imports no torch: the router uses it too.

Every refusal is a ``ModelError`` of one line: the file, the field, the value found and what is allowed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from baton.process.options import ModelError


class Fields:
    """Typed access to a JSON object. A field that is null counts as absent, as it does in transformers."""

    def __init__(self, values: Mapping[str, object], where: str, prefix: str = "") -> None:
        self._values = values
        self._where = where
        self._prefix = prefix

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all fields, in the order of the file."""
        return tuple(self._values)

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def is_null(self, name: str) -> bool:
        return name in self._values and self._values[name] is None

    def get(self, name: str) -> object:
        return self._values.get(name)

    def with_defaults(self, defaults: Mapping[str, object]) -> Fields:
        """Return this object with these values for missing fields. A null stays null."""
        return Fields({**defaults, **self._values}, self._where, self._prefix)

    def without(self, *names: str) -> Fields:
        """Return this object without the fields ``names``."""
        left = {name: value for name, value in self._values.items() if name not in names}
        return Fields(left, self._where, self._prefix)

    def invalid(self, name: str, part: object, allowed: str) -> ModelError:
        """The error of a part of a field's value."""
        where = f"{self._where}: {self._prefix}{name}"
        return ModelError(f"{where} has {json.dumps(part)}; allowed: {allowed}")

    def error(self, name: str, allowed: str) -> ModelError:
        if not self.has(name):
            return ModelError(f"{self._where}: {self._prefix}{name} is missing; needed: {allowed}")
        found = json.dumps(self._values[name])
        return ModelError(f"{self._where}: {self._prefix}{name} is {found}; allowed: {allowed}")

    def refusal(self, name: str, reason: str) -> ModelError:
        """The error of a value that is known and not served."""
        return ModelError(f"{self._where}: {self._prefix}{name} is {json.dumps(self.get(name))}: {reason}")

    def integer(self, name: str, default: int | None = None, *, minimum: int = 1) -> int:
        value = self._values[name] if self.has(name) else default
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(name, f"a whole number of at least {minimum}")
        return value

    def number(self, name: str, default: float | None = None, *, minimum: float = 0.0) -> float:
        """A finite number above 0 and not under ``minimum``."""
        value = self._values[name] if self.has(name) else default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.error(name, "a number above 0")
        if value < minimum:
            raise self.error(name, f"a number of at least {minimum:g}")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        return self.number(name) if self.has(name) else None

    def number_if_any(self, name: str) -> float | None:
        """A finite number above 0; None if the field is missing or 0, which both mean that there is none."""
        value = self._values.get(name)
        return None if value == 0 and not isinstance(value, bool) else self.optional_number(name)

    def flag(self, name: str, default: bool) -> bool:
        value = self._values[name] if self.has(name) else default
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._values[name] if self.has(name) else default
        if not isinstance(value, str):
            raise self.error(name, "a string")
        return value

    def only(self, name: str, *allowed: object) -> None:
        """Refuses a field that has another value than these. It may be missing."""
        if self.has(name) and self._values[name] not in allowed:
            raise self.error(name, " or ".join(json.dumps(value) for value in allowed))

    def object(self, name: str) -> Fields:
        value = self._values[name] if self.has(name) else {}
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return Fields(value, self._where, prefix=f"{self._prefix}{name}.")


def read_object(file: Path) -> Mapping[str, object]:
    """The JSON object in ``file``. ModelError if it holds none."""
    try:
        value: object = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file}: holds no JSON object")
    return value
