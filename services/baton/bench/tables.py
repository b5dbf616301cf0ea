"""Results as tables for a person."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from baton.bench.goals import Goals
from baton.bench.spread import Spread
from baton.bench.summary import Summary
from baton.bench.sweep.score import Comparison, Score

_MILLISECONDS = (
    ("TTFT", "ttft"),
    ("TPOT", "tpot"),
    ("ITL", "itl"),
    ("E2E", "e2e"),
    ("longest gap", "longest_gap"),
    ("sent late by", "lateness"),
)


def latency_table(rows: Mapping[str, Spread | None], title: str) -> Table:
    """Rows of times in milliseconds."""
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
    """The latencies of a run."""
    chunks = "" if summary.tokens_per_chunk_known else " (ITL between chunks: their tokens are not told)"
    rows = {name: getattr(summary, field) for name, field in _MILLISECONDS}
    return latency_table(rows, f"{summary.completed} of {summary.requests} requests answered{chunks}")


def serve_lines(summary: Summary, goals: Goals, left_out: int) -> list[str]:
    """What is no latency, a line each."""
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


def sweep_table(scores: Sequence[Score]) -> Table:
    """Candidates, best first, with the median and range of their goodputs; TTFT and ITL are 90th
    percentiles, in ms, of the best probe."""
    table = Table(title="s: max-num-seqs, t: max-num-batched-tokens, c: prefill-chunk", title_justify="left")
    table.add_column("setting", no_wrap=True)
    for column in ("goodput/s", "from - to", "TTFT", "ITL", "tok/s"):
        table.add_column(column, justify="right")
    for score in scores:
        name = f"{score.candidate}" + (" (defaults)" if score.is_default else "")
        if score.failure:
            table.add_row(name, f"failed: {score.failure}")
            continue
        low, high = score.goodput_range
        goodput = (f"{score.goodput:.2f}", f"{low:.2f} - {high:.2f}")
        probe = score.best_probe
        times = () if probe is None else (_ms(probe.ttft), _ms(probe.itl), f"{probe.output_tokens_per_s:.0f}")
        table.add_row(name, *goodput, *times)
    return table


def verdict(found: Comparison) -> list[str]:
    """What the winner is worth against the defaults, a line each; the last says what the command is that
    follows."""
    sides = [("defaults", found.default)]
    if found.winner is not None:
        sides.insert(0, (str(found.winner.candidate), found.winner))
    width = max(len(name) for name, _ in sides)
    lines = [f"  {name:<{width}}  {_trials(score)}" for name, score in sides]
    return ["last round, in turns; goodput, requests/s:", *lines, _conclusion(found)]


def _trials(score: Score) -> str:
    low, high = score.goodput_range
    return f"median {score.goodput:.2f} of {score.repeats} trials, from {low:.2f} to {high:.2f}"


def _conclusion(found: Comparison) -> str:
    default, winner = found.default, found.winner
    if winner is None or not found.enough:
        return "defaults: no other setting was measured often enough in the last round:"
    if found.better:
        gain = f" ({winner.goodput / default.goodput:.2f} times in the median)" if default.goodput else ""
        return f"better than the defaults, every trial above their best{gain}:"
    if winner.goodput == default.goodput == 0:
        return "defaults: no setting met the goals at any rate that was tried:"
    return "defaults: nothing was better beyond the spread of the trials:"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"
