"""The table of sampling parameters: what holds for a parameter wherever it is read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from google.protobuf.descriptor import Descriptor

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from ``low`` to ``high``."""

    low: float
    high: float
    open: bool = False
    """Whether ``low`` itself is excluded. ``high`` is always included."""

    def __contains__(self, value: float) -> bool:
        """NaN is in no range."""
        return self.low <= value <= self.high and (value != self.low or not self.open)

    def __str__(self) -> str:
        if self.open:
            return f"above {self.low:g} and at most {self.high:g}"
        return f"between {self.low:g} and {self.high:g}"


ANY = Range(-math.inf, math.inf)
"""The range of a parameter that is checked in another way, or not at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """The annotation that makes a field of a dataclass a row of the table."""

    range: Range = ANY
    """The values a client may ask for: of the number, or of each number in a list."""
    worker_range: Range | None = None
    """The values a worker accepts, where they differ: a client's value has been resolved and rounded by
    then."""
    with_beams: bool = True
    """Whether the parameter can be combined with beam search. Otherwise it must be neutral there."""
    api_name: str = ""
    """The API's name of the field, where it differs."""
    encode: Callable[[Any], object] | None = None
    """Makes the value of the protobuf field. None: the value is the same."""
    decode: Callable[[Any], object] | None = None
    """The inverse of ``encode``."""
    show: Callable[[Any], object] | None = None
    """Makes the value's form in an error message. None: the value itself."""

    @property
    def checked_range(self) -> Range:
        """The values a worker accepts."""
        return self.range if self.worker_range is None else self.worker_range


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterRow(ParameterSpec):
    """One row of the table: the annotation of the field, and what follows from the field."""

    name: str
    """The name of the field and of the protobuf field."""
    kind: object
    """The type of the field."""
    neutral: Any
    """The default, which changes nothing and stands for an absent protobuf field. MISSING: no default."""
    unsent: Any
    """The value that is not sent: the neutral one, unless the protobuf field tells it from an absent one.
    MISSING: every value is sent."""

    @property
    def is_number(self) -> bool:
        return self.kind in (int, float, int | None)


def table_of(cls: type[DataclassInstance], message: Descriptor) -> Mapping[str, ParameterRow]:
    """Return the rows of a dataclass whose fields are ``Annotated`` with a ParameterSpec each, by name and in
    order.

    Raises TypeError for a field without a ParameterSpec, KeyError for a field that ``message`` lacks.
    """
    hints = get_type_hints(cls, include_extras=True)
    rows = {}
    for field in dataclasses.fields(cls):
        kind, *found = get_args(hints[field.name]) or (None,)
        if len(found) != 1 or not isinstance(found[0], ParameterSpec):
            raise TypeError(f"{cls.__name__}.{field.name} must be annotated with a ParameterSpec")
        explicit = message.fields_by_name[field.name].has_presence
        rows[field.name] = ParameterRow(
            name=field.name,
            kind=kind,
            neutral=field.default,
            unsent=MISSING if explicit and field.default is not None else field.default,
            **{each.name: getattr(found[0], each.name) for each in dataclasses.fields(ParameterSpec)},
        )
    return MappingProxyType(rows)
