"""Results as tables for a person."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

from baton.bench.goals import Goals
from baton.bench.spread import Spread
from baton.bench.summary import Summary

_MILLISECONDS = (
    ("TTFT", "ttft"),
    ("TPOT", "tpot"),
    ("ITL", "itl"),
    ("E2E", "e2e"),
    ("longest gap", "longest_gap"),
    ("sent late by", "lateness"),
)


def latency_table(rows: Mapping[str, Spread | None], title: str) -> Table:
    """Return a table with rows of times in milliseconds."""
    table = Table(title=title, title_justify="left")
    table.add_column("ms")
    for column in ("mean", "median", "p90", "p99", "max"):
        table.add_column(column, justify="right")
    for name, spread in rows.items():
        if spread is not None:
            values = (spread.mean, spread.median, spread.p90, spread.p99, spread.maximum)
            table.add_row(name, *(f"{value * 1e3:.2f}" for value in values))
    return table


def serve_table(summary: Summary) -> Table:
    """Return the table of a run's latencies."""
    chunks = "" if summary.tokens_per_chunk_known else " (ITL between chunks: their tokens are not told)"
    rows = {name: getattr(summary, field) for name, field in _MILLISECONDS}
    return latency_table(rows, f"{summary.completed} of {summary.requests} requests answered{chunks}")


def serve_lines(summary: Summary, goals: Goals, left_out: int) -> list[str]:
    """Return the figures other than latencies, a line each."""
    lines = [
        f"duration            {summary.duration:.2f} s",
        f"requests            {summary.requests_per_s:.2f}/s",
        f"prompt tokens       {summary.prompt_tokens_per_s:.1f}/s ({summary.prompt_tokens}, "
        f"{summary.cached_tokens} cached)",
        f"output tokens       {summary.output_tokens_per_s:.1f}/s ({summary.output_tokens})",
        f"all tokens          {summary.tokens_per_s:.1f}/s",
    ]
    if summary.goodput is not None:
        share = f"{100 * summary.goodput.attainment:.1f} % of requests"
        lines.append(f"goodput             {summary.goodput.requests_per_s:.2f}/s within {goals} ({share})")
    for kind, count in summary.errors.items():
        lines.append(f"failed: {kind:<12}{count}")
    if left_out:
        lines.append(f"left out            {left_out} longer than the model's context")
    return lines
