"""What a dashboard's JSON asks Grafana to draw, as far as pictures need it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NotRequired, TypedDict


class _Grid(TypedDict):
    x: int
    y: int
    w: int
    h: int


class _Target(TypedDict):
    expr: str
    legendFormat: str


class _Stacking(TypedDict):
    mode: str


class _Custom(TypedDict, total=False):
    stacking: _Stacking
    fillOpacity: float


class _Step(TypedDict):
    value: float | None
    color: str


class _Thresholds(TypedDict):
    steps: list[_Step]


class _Defaults(TypedDict):
    unit: str
    custom: NotRequired[_Custom]
    thresholds: NotRequired[_Thresholds]


class _FieldConfig(TypedDict):
    defaults: _Defaults


class _Panel(TypedDict):
    type: str
    title: str
    description: str
    gridPos: _Grid
    targets: list[_Target]
    fieldConfig: _FieldConfig


@dataclass(frozen=True, slots=True)
class Box:
    """A place in the grid: 24 columns, rows counted from the top."""

    left: int
    top: int
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Target:
    """One expression, with Grafana's variables in it, and the pattern of its series' names."""

    expression: str
    legend: str


@dataclass(frozen=True, slots=True)
class Threshold:
    """A line across a panel, and the colour that Grafana gives it."""

    value: float
    colour: str


@dataclass(frozen=True, slots=True)
class DrawnPanel:
    """One panel; ``kind`` is Grafana's type: ``timeseries``, ``stat`` or ``heatmap``."""

    kind: str
    title: str
    description: str
    box: Box
    unit: str
    targets: tuple[Target, ...]
    stacked: bool
    opacity: float
    """The opacity of what is under a line, 0 to 1."""
    thresholds: tuple[Threshold, ...]


@dataclass(frozen=True, slots=True)
class Heading:
    """The title of a row of panels."""

    title: str
    box: Box


@dataclass(frozen=True, slots=True)
class Picture:
    """A whole dashboard."""

    name: str
    title: str
    description: str
    headings: tuple[Heading, ...]
    panels: tuple[DrawnPanel, ...]

    @property
    def height(self) -> int:
        """Rows of the grid."""
        boxes = [panel.box for panel in self.panels] + [heading.box for heading in self.headings]
        return max(box.top + box.height for box in boxes)


def read(path: Path) -> Picture:
    """Read what ``python -m scripts.dashboards`` has written."""
    document = json.loads(path.read_text())
    rows = [each for each in document["panels"] if each["type"] == "row"]
    panels = [each for each in document["panels"] if each["type"] != "row"]
    return Picture(
        path.stem,
        document["title"],
        document["description"],
        tuple(Heading(each["title"], _box(each["gridPos"])) for each in rows),
        tuple(_panel(each) for each in panels),
    )


def _box(grid: _Grid) -> Box:
    return Box(grid["x"], grid["y"], grid["w"], grid["h"])


def _panel(panel: _Panel) -> DrawnPanel:
    defaults = panel["fieldConfig"]["defaults"]
    custom = defaults.get("custom", _Custom())
    steps = defaults["thresholds"]["steps"] if "thresholds" in defaults else []
    return DrawnPanel(
        panel["type"],
        panel["title"],
        panel["description"],
        _box(panel["gridPos"]),
        defaults["unit"],
        tuple(Target(each["expr"], each["legendFormat"]) for each in panel["targets"]),
        "stacking" in custom and custom["stacking"]["mode"] == "normal",
        custom.get("fillOpacity", 0) / 100,
        tuple(Threshold(step["value"], step["color"]) for step in steps if step["value"] is not None),
    )
