"""The results of a sweep as a table for a person."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from baton.bench.sweep.score import Comparison, Score


def sweep_table(scores: Sequence[Score]) -> Table:
    """Return the candidates, best first, with the median and range of their goodputs; TTFT and ITL are 90th
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
    """Return lines that compare the winner with the defaults; the last one introduces the command that the
    caller prints after it."""
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
