"""Dashboards as data, and the JSON that Grafana reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scripts.dashboards.limits import limit_of

Kind = Literal["timeseries", "stat", "heatmap"]
Unit = Literal[
    "s",
    "reqps",
    "ops",
    "short",
    "percentunit",
    "Bps",
    "bytes",
    "none",
    "tokens",
    "tokens/s",
    "blocks",
    "steps/s",
]
"""As Grafana names them; words it does not know are shown behind the number."""

SCHEMA_VERSION = 39
COLUMNS = 24
TAG = "baton"


@dataclass(frozen=True, slots=True)
class Query:
    """One expression, and the name of its series."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture. ``needs``: why it may be empty on a ring that works, if it may. ``alert``: who fires above
    the line that is drawn, if there is one."""

    title: str
    unit: Unit
    queries: tuple[Query, ...]
    text: str = ""
    kind: Kind = "timeseries"
    stacked: bool = False
    width: int = 12
    height: int = 8
    needs: str = ""
    alert: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """``uid`` names it for ever: links and bookmarks hold it."""

    uid: str
    title: str
    text: str
    rows: tuple[Row, ...]


def document(dashboard: Dashboard) -> dict[str, object]:
    """What Grafana imports. Places and ids follow from the order."""
    panels: list[dict[str, object]] = []
    top = 0
    for row in dashboard.rows:
        at = {"h": 1, "w": COLUMNS, "x": 0, "y": top}
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": row.title,
                "gridPos": at,
                "collapsed": False,
                "panels": [],
            }
        )
        top += 1
        left = height = 0
        for panel in row.panels:
            if left + panel.width > COLUMNS:
                left, top, height = 0, top + height, 0
            at = {"h": panel.height, "w": panel.width, "x": left, "y": top}
            panels.append({"id": len(panels) + 1, "gridPos": at, **_panel(panel)})
            left += panel.width
            height = max(height, panel.height)
        top += height
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.text,
        "tags": [TAG],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": _variables()},
        "annotations": {"list": []},
        "links": [
            {
                "type": "dashboards",
                "title": "Baton",
                "tags": [TAG],
                "asDropdown": True,
                "keepTime": True,
                "includeVars": True,
                "targetBlank": False,
                "icon": "external link",
                "tooltip": "",
                "url": "",
            }
        ],
        "panels": panels,
    }


def _variables() -> list[dict[str, object]]:
    return [
        {
            "name": "datasource",
            "label": "Prometheus",
            "type": "datasource",
            "query": "prometheus",
            "refresh": 1,
            "hide": 0,
            "includeAll": False,
            "multi": False,
            "regex": "",
            "options": [],
            "current": {},
        },
        _query_variable("namespace", "Namespace"),
        _query_variable("model", "Model"),
    ]


def _query_variable(label: str, title: str) -> dict[str, object]:
    """``.*`` means all, also where nothing has the label."""
    query = f"label_values(baton_info, {label})"
    return {
        "name": label,
        "label": title,
        "type": "query",
        "datasource": _datasource(),
        "definition": query,
        "query": {"query": query, "refId": label},
        "refresh": 2,
        "sort": 1,
        "hide": 0,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "regex": "",
        "options": [],
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def _datasource() -> dict[str, object]:
    return {"type": "prometheus", "uid": "${datasource}"}


def _panel(panel: Panel) -> dict[str, object]:
    text = f"{panel.text} The dashed line: {panel.alert}." if panel.alert else panel.text
    text = f"{text} Empty unless {panel.needs}." if panel.needs else text
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": text.strip(),
        "datasource": _datasource(),
        "targets": [_target(query, index, panel.kind) for index, query in enumerate(panel.queries)],
        "fieldConfig": {
            "defaults": {"unit": _unit(panel.unit), "min": 0, **_thresholds(panel), **_drawing(panel)},
            "overrides": [],
        },
        "options": _options(panel),
    }


def _unit(unit: Unit) -> str:
    return f"suffix: {unit}" if unit in ("tokens", "tokens/s", "blocks", "steps/s") else unit


def _target(query: Query, index: int, kind: Kind) -> dict[str, object]:
    target: dict[str, object] = {
        "refId": chr(ord("A") + index),
        "datasource": _datasource(),
        "expr": query.expr,
        "legendFormat": query.legend,
        "range": True,
    }
    if kind == "heatmap":
        target["format"] = "heatmap"
    return target


def _thresholds(panel: Panel) -> dict[str, object]:
    if not panel.alert:
        return {}
    steps = [{"color": "green", "value": None}, {"color": "red", "value": limit_of(panel.alert)}]
    return {"thresholds": {"mode": "absolute", "steps": steps}}


def _drawing(panel: Panel) -> dict[str, object]:
    if panel.kind != "timeseries":
        return {}
    stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
    fill = 40 if panel.stacked else 8
    return {
        "custom": {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": fill,
            "showPoints": "never",
            "spanNulls": True,
            "stacking": stacking,
            **({"thresholdsStyle": {"mode": "dashed"}} if panel.alert else {}),
        }
    }


def _options(panel: Panel) -> dict[str, object]:
    if panel.kind == "stat":
        return {
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "colorMode": "none",
            "graphMode": "area",
            "textMode": "auto",
        }
    if panel.kind == "heatmap":
        return {
            "calculate": False,
            "yAxis": {"unit": panel.unit},
            "cellGap": 1,
            "legend": {"show": True},
            "color": {"mode": "scheme", "scheme": "Blues", "steps": 32},
            "tooltip": {"mode": "single"},
        }
    return {
        "legend": {"displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull", "max"]},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
