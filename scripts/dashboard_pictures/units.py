"""Figures as Grafana writes them, by the unit of their panel."""

from __future__ import annotations

import math

_SUFFIX = "suffix: "
_DECIMAL = ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k"))
_SECONDS = (
    (86400.0, "day"),
    (3600.0, "h"),
    (60.0, "min"),
    (1.0, "s"),
    (1e-3, "ms"),
    (1e-6, "µs"),
    (1e-9, "ns"),
)
_BINARY = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"))


def written(value: float, unit: str) -> str:
    """Return a figure with three digits and its unit; ValueError if Grafana's unit is not known here."""
    if math.isnan(value):
        return "–"
    match unit:
        case "s":
            return _scaled(value, _SECONDS, "s")
        case "percentunit":
            return f"{_digits(100 * value)}%"
        case "reqps":
            return f"{_short(value)} req/s"
        case "ops":
            return f"{_short(value)} ops/s"
        case "Bps":
            return _short(value, "B/s")
        case "bytes":
            return _scaled(value, _BINARY, "B")
        case "short" | "none":
            return _short(value)
    if unit.startswith(_SUFFIX):
        return f"{_short(value)} {unit.removeprefix(_SUFFIX)}"
    raise ValueError(f"no unit that is drawn: {unit!r}")


def _short(value: float, behind: str = "") -> str:
    for size, prefix in _DECIMAL:
        if abs(value) >= size:
            return f"{_digits(value / size)}{prefix}{behind}"
    return f"{_digits(value)} {behind}".strip()


def _scaled(value: float, sizes: tuple[tuple[float, str], ...], smallest: str) -> str:
    for size, name in sizes:
        if abs(value) >= size:
            return f"{_digits(value / size)} {name}"
    return f"{_digits(value)} {smallest}"


def _digits(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"
