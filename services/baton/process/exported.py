"""Fields of stats that are exported as metrics, declared where the fields are.

The owner of some counts declares them as a dataclass, each field with the metric that it becomes:

    preemptions: Annotated[int, counter("baton_preemptions", "Sequences that lost their blocks to others.")]

Collectors derive the metrics from these fields, so that nothing else names a figure. Fields without a mark
are not exported by themselves. This module does not import Prometheus: counting needs none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal, Self, get_type_hints

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True, slots=True)
class ExportedMetric:
    """The metric that a field is exported as. It has one value, and no labels but those of the process."""

    kind: Literal["counter", "gauge"]
    name: str
    """The name, without the ``_total`` of counters."""
    text: str
    """The help text on the page of metrics."""


def counter(name: str, text: str) -> ExportedMetric:
    """Marks a figure that only grows while the process lives."""
    return ExportedMetric("counter", name, text)


def gauge(name: str, text: str) -> ExportedMetric:
    """Marks a figure that goes up and down."""
    return ExportedMetric("gauge", name, text)


class Counters:
    """The base of a dataclass of numbers that its owner adds to in place, under the owner's lock."""

    def copy(self) -> Self:
        """Return a copy of the numbers. Call it under the owner's lock."""
        return type(self)(**vars(self))


def exported_figures(stats: DataclassInstance) -> Iterator[tuple[ExportedMetric, float]]:
    """Yield every marked field of a dataclass, and of the dataclasses among its fields, in their order."""
    for name, metric in _exported_fields(type(stats)):
        value = getattr(stats, name)
        if metric is None:
            yield from exported_figures(value)
        else:
            yield metric, value


@cache
def _exported_fields(stats: type[DataclassInstance]) -> tuple[tuple[str, ExportedMetric | None], ...]:
    """Return the name and metric of each marked field, and of each field that is a dataclass, whose metric is
    None."""
    found: list[tuple[str, ExportedMetric | None]] = []
    hints = get_type_hints(stats, include_extras=True)
    for field in fields(stats):
        hint = hints[field.name]
        marks = [mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, ExportedMetric)]
        if marks:
            found.append((field.name, marks[0]))
        elif is_dataclass(hint):
            found.append((field.name, None))
    return tuple(found)
