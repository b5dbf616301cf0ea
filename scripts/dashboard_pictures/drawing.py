"""Dashboards drawn as Grafana lays them out: its grid, its palette, legends with last and largest figures."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from scripts.dashboard_pictures.answers import Series
from scripts.dashboard_pictures.reading import Box, DrawnPanel, Picture, Target
from scripts.dashboard_pictures.units import written

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Ask = Callable[[Target], list[Series]]
"""The series of a query."""

DPI = 100
COLUMN, ROW, HEADER, GAP = 54, 34, 64, 4
"""Pixels of a column, of a row, of the title above all, and between panels."""
PALETTE = (
    *("#7eb26d", "#eab839", "#6ed0e0", "#ef843c", "#e24d42", "#1f78c1", "#ba43a9", "#705da0"),
    *("#508642", "#cca300", "#447ebc", "#c15c17", "#890f02", "#0a437c", "#6d1f62", "#584477"),
)
COLOURS = {"red": "#e02f44", "orange": "#ff9830", "yellow": "#e0b400", "green": "#73bf69"}
PAGE, PANEL, EDGE, TEXT, FAINT = "#f4f5f5", "#ffffff", "#d8d9da", "#1f2429", "#6e7681"
LEGEND_ROWS = 4
_LEGEND_ROW, _TITLE, _AXIS = 14, 24, 84


class Canvas:
    """A figure that is addressed in pixels from its upper left corner."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI, facecolor=PAGE)

    def axes(self, left: float, top: float, width: float, height: float) -> Axes:
        bottom = 1 - (top + height) / self.height
        return self.figure.add_axes(
            (left / self.width, bottom, width / self.width, height / self.height), facecolor=PANEL
        )

    def box(self, left: float, top: float, width: float, height: float) -> None:
        shape = FancyBboxPatch(
            (left / self.width, 1 - (top + height) / self.height),
            width / self.width,
            height / self.height,
            boxstyle="square,pad=0",
            facecolor=PANEL,
            edgecolor=EDGE,
            linewidth=0.8,
            transform=self.figure.transFigure,
            zorder=-1,  # beneath the axes, which a figure draws before its own shapes
        )
        self.figure.add_artist(shape)

    def text(
        self,
        left: float,
        top: float,
        text: str,
        size: float,
        *,
        colour: str = TEXT,
        weight: str = "normal",
        right: bool = False,
    ) -> None:
        self.figure.text(
            left / self.width,
            1 - top / self.height,
            text.replace("$", r"\$"),
            size=size,
            color=colour,
            weight=weight,
            ha="right" if right else "left",
            va="top",
        )


def drawn(picture: Picture, ask: Ask, seconds: float) -> Figure:
    """Draw a dashboard of ``seconds`` of time; ``ask`` answers its queries."""
    canvas = Canvas(24 * COLUMN + 2 * GAP, HEADER + picture.height * ROW + GAP)
    canvas.text(2 * GAP, 10, picture.title, 15, weight="bold")
    canvas.text(2 * GAP, 38, picture.description, 9.5, colour=FAINT)
    for heading in picture.headings:
        _, top, _, _ = _place(heading.box)
        canvas.text(2 * GAP, top + 10, heading.title, 11, weight="bold")
    for panel in picture.panels:
        _panel(canvas, panel, [series for target in panel.targets for series in ask(target)], seconds)
    return canvas.figure


def _place(box: Box) -> tuple[float, float, float, float]:
    """Return left, top, width and height in pixels."""
    left, top = GAP + box.left * COLUMN, HEADER + box.top * ROW
    return left, top, box.width * COLUMN - GAP, box.height * ROW - GAP


def _panel(canvas: Canvas, panel: DrawnPanel, series: Sequence[Series], seconds: float) -> None:
    left, top, width, height = _place(panel.box)
    canvas.box(left, top, width, height)
    size = min(9.0, 9 * (width - 16) / (7.6 * len(panel.title)))
    canvas.text(left + 8, top + 6, panel.title, size, weight="bold")
    if not series:
        _nothing(canvas, panel)
    elif panel.kind == "stat":
        _stat(canvas, panel, series)
    elif panel.kind == "heatmap":
        _heatmap(canvas, panel, series, seconds)
    else:
        _lines(canvas, panel, series, seconds)


def _nothing(canvas: Canvas, panel: DrawnPanel) -> None:
    """Say that there is no data, and why, if the dashboard does."""
    left, top, width, height = _place(panel.box)
    _, found, reason = panel.description.rpartition("Empty unless ")
    lines = ["No data", *textwrap.wrap(f"empty unless {reason}" if found else "", int(width / 7))]
    for number, line in enumerate(lines):
        size = 9 if number else 12
        canvas.text(left + 12, top + height / 2 - 20 + 18 * number, line, size, colour=FAINT)


def _stat(canvas: Canvas, panel: DrawnPanel, series: Sequence[Series]) -> None:
    """Draw the last figure of the first series large, and its past beneath."""
    left, top, width, height = _place(panel.box)
    [first, *_] = series
    canvas.text(left + 12, top + 32, written(first.values[-1], panel.unit), 16)
    axes = canvas.axes(left + 1, top + height * 0.62, width - 2, height * 0.38 - 1)
    axes.fill_between(first.times, first.values, color=PALETTE[5], alpha=0.15, linewidth=0)
    axes.plot(first.times, first.values, color=PALETTE[5], linewidth=1)
    axes.set_ylim(bottom=0, top=max(first.values) * 1.1 or 1)
    axes.margins(x=0)
    axes.axis("off")


def _lines(canvas: Canvas, panel: DrawnPanel, series: Sequence[Series], seconds: float) -> None:
    left, top, width, height = _place(panel.box)
    columns = 2 if len(series) > LEGEND_ROWS else 1
    shown = series[: LEGEND_ROWS * columns]
    legend = _LEGEND_ROW * min(LEGEND_ROWS, len(shown)) + 8
    axes = canvas.axes(left + _AXIS, top + _TITLE + 6, width - _AXIS - 14, height - _TITLE - legend - 28)
    if panel.stacked:
        _stack(axes, panel, series)
    else:
        for number, each in enumerate(series):
            colour = PALETTE[number % len(PALETTE)]
            axes.plot(each.times, each.values, color=colour, linewidth=1.1)
            axes.fill_between(each.times, each.values, color=colour, alpha=panel.opacity, linewidth=0)
    axes.set_ylim(bottom=0)
    highest = axes.get_ylim()[1] if any(max(each.values) > 0 for each in series) else 1.0
    for threshold in panel.thresholds:
        colour = COLOURS.get(threshold.colour, threshold.colour)
        axes.axhline(threshold.value, color=colour, linewidth=1, linestyle=(0, (6, 4)))
    axes.set_ylim(0, highest)  # of the figures: a limit far above them would press them flat
    _frame(axes, panel.unit, seconds)
    below = top + height - legend
    _legend(canvas, panel, shown, (left, below, width), columns)
    if len(shown) < len(series):
        canvas.text(left + width - 8, top + 6, f"{len(series)} series", 8, colour=FAINT, right=True)


def _stack(axes: Axes, panel: DrawnPanel, series: Sequence[Series]) -> None:
    """Draw each series above the ones before; a point that a series lacks counts as zero."""
    times = sorted({when for each in series for when in each.times})
    below = [0.0] * len(times)
    for number, each in enumerate(series):
        at = dict(zip(each.times, each.values, strict=True))
        above = [low + at.get(when, 0.0) for low, when in zip(below, times, strict=True)]
        colour = PALETTE[number % len(PALETTE)]
        axes.fill_between(times, below, above, color=colour, alpha=panel.opacity, linewidth=0)
        axes.plot(times, above, color=colour, linewidth=1.1)
        below = above


def _heatmap(canvas: Canvas, panel: DrawnPanel, series: Sequence[Series], seconds: float) -> None:
    """Draw what fell into each bucket, whose series count it and all lower ones."""
    left, top, width, height = _place(panel.box)
    axes = canvas.axes(left + _AXIS, top + _TITLE + 6, width - _AXIS - 14, height - _TITLE - 34)
    buckets = sorted(series, key=lambda each: float(each.labels["le"]))
    times = sorted({when for each in buckets for when in each.times})
    rows: list[list[float]] = []
    lower = [0.0] * len(times)
    for each in buckets:
        at = dict(zip(each.times, each.values, strict=True))
        here = [at.get(when, 0.0) for when in times]
        rows.append([max(0.0, more - less) for more, less in zip(here, lower, strict=True)])
        lower = here
    axes.pcolormesh(times, range(len(rows)), rows, cmap="Blues", shading="nearest")
    edges = [float(each.labels["le"]) for each in buckets]
    some = range(0, len(edges), max(1, len(edges) // 6))
    _frame(axes, panel.unit, seconds)
    axes.grid(visible=False)
    axes.set_ylim(-0.5, len(rows) - 0.5)
    axes.set_yticks([row + 0.5 for row in some], [_edge(edges[row], panel.unit) for row in some])


def _edge(value: float, unit: str) -> str:
    return "∞" if value == float("inf") else written(value, unit)


def _frame(axes: Axes, unit: str, seconds: float) -> None:
    axes.set_xlim(0, seconds)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f} s"))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: written(value, unit)))
    axes.tick_params(labelsize=7.5, colors=FAINT, length=0)
    axes.grid(color=EDGE, linewidth=0.5)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _legend(
    canvas: Canvas,
    panel: DrawnPanel,
    series: Sequence[Series],
    place: tuple[float, float, float],
    columns: int,
) -> None:
    left, top, width = place
    column = width / columns
    for number, each in enumerate(series):
        at = left + column * (number // LEGEND_ROWS)
        row = top + _LEGEND_ROW * (number % LEGEND_ROWS)
        canvas.text(at + 12, row - 2, "━", 9, colour=PALETTE[number % len(PALETTE)], weight="bold")
        figures = f"{written(each.values[-1], panel.unit)} (max {written(max(each.values), panel.unit)})"
        room = int((column - 45 - 5.2 * len(figures)) / 5.3)
        canvas.text(at + 30, row, _cut(each.name, room), 7.5)
        canvas.text(at + column - 10, row, figures, 7.5, colour=FAINT, right=True)


def _cut(name: str, most: int) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"
