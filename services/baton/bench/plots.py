"""Plots of results. Needs matplotlib, which ``pip install 'baton[bench]'`` brings."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from baton.bench.document import check_writable
from baton.bench.goals import Goals
from baton.bench.record import RequestRecord
from baton.process.options import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".png")
_BINS = 60


def check_plot(option: str, path: Path | None) -> None:
    """Check before a long run that its plot can be drawn. Raises ConfigError."""
    if path is None:
        return
    if path.suffix not in SUFFIXES:
        raise ConfigError(option, f"must end in {' or '.join(SUFFIXES)}, not {path.name!r}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(option, "needs matplotlib; install it with: pip install 'baton[bench]'")
    check_writable(option, path)


def new_figure(panels: int, title: str) -> tuple[Figure, list[Axes]]:
    """Return a figure with a row of panels. No display is needed, and no state is shared between figures."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * panels, 4.2), layout="constrained")
    figure.suptitle(title)
    return figure, [figure.add_subplot(1, panels, place + 1) for place in range(panels)]


def plot_serve(path: Path, records: Sequence[RequestRecord], goals: Goals, title: str) -> None:
    """Plot TTFT and ITL as cumulative distributions, and tokens per second over time."""
    whole = [record for record in records if record.failure is None]
    figure, (ttft, itl, rate) = new_figure(3, title)
    _distribution(ttft, "time to first token", [record.ttft for record in whole], goals.ttft)
    _distribution(itl, "inter-token latency", [gap for record in whole for gap in record.itl], goals.itl)
    _throughput(rate, records)
    figure.savefig(path)


def _distribution(axes: Axes, what: str, seconds: Sequence[float], goal: float | None) -> None:
    milliseconds = sorted(1e3 * value for value in seconds)
    shares = [(place + 1) / len(milliseconds) for place in range(len(milliseconds))]
    axes.step(milliseconds, shares, where="post")
    if goal is not None:
        axes.axvline(1e3 * goal, label=f"goal {1e3 * goal:g} ms", color="tab:red", linestyle="--")
        axes.legend(loc="lower right")
    axes.set(xlabel=f"{what}, ms", ylabel="share at most so long", ylim=(0, 1.02))
    axes.grid(alpha=0.3)


def _throughput(axes: Axes, records: Sequence[RequestRecord]) -> None:
    """Plot the tokens of all arrivals, those of failed requests included: the server generated them."""
    arrivals = [(record.sent + one.at, one.tokens) for record in records for one in record.arrivals]
    end = max((at for at, _ in arrivals), default=0.0)
    width = max(end / _BINS, 1e-3)
    counts = [0] * (_BINS + 1)
    for at, tokens in arrivals:
        counts[min(_BINS, int(at / width))] += tokens
    edges = list(itertools.accumulate(itertools.repeat(width, _BINS + 1), initial=0.0))
    axes.stairs([count / width for count in counts], edges, fill=True, alpha=0.7)
    axes.set(xlabel="time, s", ylabel="output tokens/s", xlim=(0, edges[-1]))
    axes.grid(alpha=0.3)
