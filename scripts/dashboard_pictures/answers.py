"""Prometheus' answers to the queries of a panel, over a span of time."""

from __future__ import annotations

import json
import math
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

from scripts.dashboard_pictures.reading import Target

_NAME = re.compile(r"\{\{\s*(\w+)\s*\}\}")


@dataclass(frozen=True, slots=True)
class Span:
    """What a dashboard shows: from ``start`` to ``end`` in seconds of Unix time, a point every ``step``."""

    start: float
    end: float
    step: float


@dataclass(frozen=True, slots=True)
class Series:
    """One line: its name, its labels, and its points without those that are no number."""

    name: str
    labels: Mapping[str, str]
    times: tuple[float, ...]
    """Seconds since the span began."""
    values: tuple[float, ...]


class Source:
    """A Prometheus, seen through Grafana's variables: all namespaces and models, rates over ``interval``.

    ``names``: a process's address → what legends say for it.
    """

    def __init__(self, url: str, span: Span, interval: str, names: Mapping[str, str]) -> None:
        self._url = url
        self._span = span
        self._variables = {"__rate_interval": interval, "namespace": ".*", "model": ".*"}
        self._names = names

    @property
    def seconds(self) -> float:
        return self._span.end - self._span.start

    def ask(self, target: Target) -> list[Series]:
        """Return the series of a query. ValueError with what Prometheus says if it refuses."""
        expression = target.expression
        for variable, value in self._variables.items():
            expression = expression.replace(f"${variable}", value)
        wanted = {"start": self._span.start, "end": self._span.end, "step": self._span.step}
        query = urllib.parse.urlencode({"query": expression} | wanted)
        try:
            with urllib.request.urlopen(f"{self._url}/api/v1/query_range?{query}", timeout=30) as response:
                found = json.load(response)["data"]["result"]
        except urllib.error.HTTPError as error:
            raise ValueError(f"{expression}: {error.read().decode()}") from None
        series = (self._series(target, each["metric"], each["values"]) for each in found)
        return sorted((each for each in series if each.values), key=lambda each: each.name)

    def _series(self, target: Target, labels: dict[str, str], points: list[tuple[float, str]]) -> Series:
        known = {label: self._names.get(value, value) for label, value in labels.items()}
        name = _NAME.sub(lambda match: known.get(match[1], ""), target.legend)
        read = [(when - self._span.start, float(value)) for when, value in points]
        there = [(when, value) for when, value in read if math.isfinite(value)]
        times, values = tuple(when for when, _ in there), tuple(value for _, value in there)
        return Series(name, labels, times, values)
