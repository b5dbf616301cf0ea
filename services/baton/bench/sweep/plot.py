"""The plot of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from baton.bench.goals import Goals
from baton.bench.plots import new_figure
from baton.bench.sweep.score import Comparison, Probe, Score

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_BARS = 24
_BEST, _DEFAULTS, _OTHERS = "tab:green", "tab:orange", "tab:blue"
_LETTERS = (
    "p, d, b: prefill and decode workers, and those that do both; s: max-num-seqs; "
    "t: max-num-batched-tokens; c: prefill-chunk"
)


def plot_sweep(path: Path, scores: Sequence[Score], goals: Goals, title: str) -> None:
    """Plot goodput by setting with the spread of the last round, and the frontier of TTFT against throughput
    over all probes. ``scores`` are best first."""
    figure, (bars, frontier) = new_figure(2, f"{title}: goodput within {goals} ms")
    found = Comparison.of(scores)
    _bars(bars, scores, found)
    _frontier(frontier, scores, found, goals)
    figure.supxlabel(_LETTERS, fontsize=7)
    figure.savefig(path, dpi=130)


def _bars(axes: Axes, scores: Sequence[Score], found: Comparison) -> None:
    """Draw a bar per score; candidates dropped earlier, and so measured for a shorter time, are pale."""
    shown = list(scores)[:_MAX_BARS][::-1]
    for place, score in enumerate(shown):
        last = score.last_round == found.default.last_round
        axes.barh(place, score.goodput, color=_colour(score, found), alpha=1.0 if last else 0.35)
        if score.repeats > 1:
            low, high = score.goodput_range
            spread = [[score.goodput - low], [high - score.goodput]]
            axes.errorbar(score.goodput, place, xerr=spread, color="black", capsize=4, linewidth=1.2)
        axes.annotate(
            "failed" if score.failure else f"{score.goodput:.2f}",
            (score.goodput_range[1], place),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
        )
    axes.set_yticks(range(len(shown)), [_name(score, found) for score in shown], fontsize=7)
    axes.set(xlabel="goodput, requests/s", title="median, and spread of the last round; pale: dropped before")
    axes.title.set_fontsize(9)
    axes.margins(x=0.12)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def _frontier(axes: Axes, scores: Sequence[Score], found: Comparison, goals: Goals) -> None:
    groups: tuple[tuple[str, str, Callable[[Score], bool]], ...] = (
        ("other settings", _OTHERS, lambda score: score not in (found.default, found.winner)),
        ("defaults", _DEFAULTS, lambda score: score is found.default),
        ("best found", _BEST, lambda score: score is found.winner),
    )
    for label, colour, belongs in groups:
        points = [point for score in scores if belongs(score) for point in _points(score)]
        if points:
            axes.scatter(*_columns(points), s=18, alpha=0.7, color=colour, label=label, linewidths=0)
    best = pareto([point for score in scores for point in _points(score)])
    axes.plot(*_columns(best), color="black", linewidth=1.0, label="frontier")
    if goals.ttft is not None:
        label = f"goal, {1e3 * goals.ttft:g} ms"
        axes.axvline(1e3 * goals.ttft, color="tab:red", linestyle="--", label=label)
    axes.set(xlabel="TTFT, ms (90th percentile, log scale)", ylabel="output tokens/s", xscale="log")
    axes.set_title("each rate that was tried", fontsize=9)
    _plain_ticks(axes)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)


def _plain_ticks(axes: Axes) -> None:
    """Label the axis with 50, 100, 200 rather than with powers of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _name(score: Score, found: Comparison) -> str:
    mark = " (defaults)" if score.is_default else " (best found)" if score is found.winner else ""
    return f"{score.candidate}{mark}"


def _colour(score: Score, found: Comparison) -> str:
    return _DEFAULTS if score.is_default else _BEST if score is found.winner else _OTHERS


def pareto(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points (TTFT, throughput) with no other point both of lower TTFT and of higher throughput,
    by TTFT."""
    best: list[tuple[float, float]] = []
    for ttft, throughput in sorted(points, key=lambda point: (point[0], -point[1])):
        if not best or throughput > best[-1][1]:
            best.append((ttft, throughput))
    return best


def _points(score: Score) -> list[tuple[float, float]]:
    """Return TTFT in milliseconds and throughput in tokens/s of each probe."""
    probes: list[Probe] = [probe for trial in score.trials for probe in trial.probes]
    return [(1e3 * probe.ttft, probe.output_tokens_per_s) for probe in probes if probe.ttft is not None]


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
