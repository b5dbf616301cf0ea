"""Typed access to the fields of a JSON object. Imports no torch: the router uses it too.

Every refusal is a ``ModelError`` of one line: the file, the field, the value found and what is allowed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from baton.process.bounded_json import parse_json
from baton.process.options import ModelError

MOST_JSON_BYTES = 1 << 26
"""The size of the largest file that is read as JSON."""
LARGEST = 2**31 - 1
"""The largest whole number that a field may have: products of two are sizes that torch can name."""
LARGEST_NUMBER = 3e38
"""The largest of other numbers, the end of float32."""
MOST_LAYERS = 10_000
"""The most layers of a model, as what is said of each of them is kept."""
MOST_SHOWN = 200
"""The characters of a value that an error shows."""


class Fields:
    """Typed access to a JSON object. A field that is null counts as absent, as it does in transformers."""

    def __init__(self, values: Mapping[str, object], where: str, prefix: str = "") -> None:
        self._values = values
        self._where = where
        self._prefix = prefix
        self._seen: list[str] = []
        """The fields that were looked at, in order, in this object and those made of it."""

    def _like(self, values: Mapping[str, object], prefix: str) -> Fields:
        made = Fields(values, self._where, prefix)
        made._seen = self._seen
        return made

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all fields, in the order of the file."""
        return tuple(self._values)

    def has(self, name: str) -> bool:
        return self.get(name) is not None

    def is_null(self, name: str) -> bool:
        return name in self._values and self.get(name) is None

    def get(self, name: str) -> object:
        self._seen.append(f"{self._prefix}{name}")
        return self._values.get(name)

    def with_defaults(self, defaults: Mapping[str, object]) -> Fields:
        """Return this object with these values for missing fields. A null stays null."""
        return self._like({**defaults, **self._values}, self._prefix)

    def without(self, *names: str) -> Fields:
        """Return this object without the fields ``names``."""
        left = {name: value for name, value in self._values.items() if name not in names}
        return self._like(left, self._prefix)

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Turn what code raises of values that it did not expect into a ModelError, which names the field
        that was looked at last."""
        try:
            yield
        except ModelError:
            raise
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            told = f"{type(error).__name__}: {error}"
            field = f"{self._seen[-1]}, or a field before it" if self._seen else "a field"
            raise ModelError(f"{self._where}: {field}, has a value that cannot be read ({told})") from error

    def invalid(self, name: str, part: object, allowed: str) -> ModelError:
        """The error of a part of a field's value."""
        where = f"{self._where}: {self._prefix}{name}"
        return ModelError(f"{where} has {_shown(part)}; allowed: {allowed}")

    def error(self, name: str, allowed: str) -> ModelError:
        if not self.has(name):
            return ModelError(f"{self._where}: {self._prefix}{name} is missing; needed: {allowed}")
        found = _shown(self._values[name])
        return ModelError(f"{self._where}: {self._prefix}{name} is {found}; allowed: {allowed}")

    def refusal(self, name: str, reason: str) -> ModelError:
        """The error of a value that is known and not served."""
        return ModelError(f"{self._where}: {self._prefix}{name} is {_shown(self.get(name))}: {reason}")

    def integer(
        self, name: str, default: int | None = None, *, minimum: int = 1, maximum: int = LARGEST
    ) -> int:
        value = self._values[name] if self.has(name) else default
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(name, f"a whole number of at least {minimum}")
        if value > maximum:
            raise self.error(name, f"a whole number of at most {maximum}")
        return value

    def number(self, name: str, default: float | None = None, *, minimum: float = 0.0) -> float:
        """A finite number above 0 and not under ``minimum``."""
        value = self._values[name] if self.has(name) else default
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.error(name, "a number above 0")
        if value < minimum:
            raise self.error(name, f"a number of at least {minimum:g}")
        if value > LARGEST_NUMBER:
            raise self.error(name, f"a number of at most {LARGEST_NUMBER:g}")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        return self.number(name) if self.has(name) else None

    def number_if_any(self, name: str) -> float | None:
        """A finite number above 0; None if the field is missing or 0, which both mean that there is none."""
        value = self.get(name)
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
        return self._like(value, f"{self._prefix}{name}.")


def _shown(value: object) -> str:
    """A value for an error of one line."""
    text = json.dumps(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"


def read_object(file: Path) -> Mapping[str, object]:
    """The JSON object in ``file``. ModelError if it holds none."""
    try:
        with file.open("rb") as stream:
            text = stream.read(MOST_JSON_BYTES + 1)
        if len(text) > MOST_JSON_BYTES:
            raise ValueError(f"over {MOST_JSON_BYTES} bytes")
        value = parse_json(text)
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file}: holds no JSON object")
    return value
