"""Rows as text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.table import Table

from loadtest.hostile.verdict import Row
from loadtest.hostile.vocabulary import Felt

HEADS = (
    "attack",
    "",
    "RSS, MiB",
    "turn, ms",
    "ITL p99, ms",
    "TTFT p99, ms",
    "failed",
    "got",
    "worked",
    "held",
)


def line(row: Row) -> str:
    """Return one row as a line, printed as soon as it exists."""
    worked = "worked" if row.worked else "failed"
    bounds = "; ".join(row.broken) or "bounds hold"
    if row.skipped:
        return f"{row.name}: skipped, {row.skipped}"
    figures = ", ".join(f"{name} {value:g}" for name, value in row.found.figures.items())
    return f"{row.name}: the attack {worked} ({row.aim}); {bounds}; {figures} {row.found.said}".strip()


def of(rows: Sequence[Row]) -> Table:
    """Return the table of all rows."""
    shown = Table(*HEADS)
    for row in rows:
        got = ", ".join(f"{count} x {ending}" for ending, count in row.found.got.items())
        if row.skipped:
            shown.add_row(row.name, row.finding, *["-"] * 5, f"skipped: {row.skipped}", "-", "-")
            continue
        shown.add_row(
            row.name,
            row.finding or "-",
            *_figures(row),
            got,
            "YES" if row.worked else "no",
            "yes" if row.holds else "; ".join(row.broken) or "NO",
        )
    return shown


def _figures(row: Row) -> list[str]:
    """Return the figures: RSS of the router and of its children; the longest turn, and its own part, or in
    brackets how long a probe waited for its answer; the others calm and under attack."""
    watched, felt = row.watched, row.felt
    if watched is None or felt is None:
        return ["-"] * 5
    silence = f"({1e3 * felt.silence:.0f})"
    return [
        f"{watched.rss_before:.0f} > {watched.rss_peak:.0f} + {watched.children_peak:.0f}",
        silence if math.isnan(felt.turn) else f"{_turns(felt)} {silence}",
        f"{1e3 * felt.itl_calm:.0f} > {1e3 * felt.itl:.0f} ({felt.ratio:.1f}x)",
        f"{1e3 * felt.ttft_calm:.0f} > {1e3 * felt.ttft:.0f}",
        f"{sum(felt.failed.values())} of {felt.requests}, {felt.probes_failed} probes",
    ]


def _turns(felt: Felt) -> str:
    turn = f"{1e3 * felt.turn:.0f}"
    return turn if math.isnan(felt.own_turn) else f"{turn} / {1e3 * felt.own_turn:.0f}"
