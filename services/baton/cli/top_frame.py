"""One frame of ``baton top``. Pure: figures in, something that `rich` shows out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType

from rich.console import Group
from rich.table import Table
from rich.text import Text

from baton.cli.ring_figures import PointFigures, RingFigures, WorkerFigures, WorkerRates

HEAD_LINES = 7
"""The lines of a frame above its workers, the heading of the workers included."""
_BAR, _SPARKS = 8, 30
"""The characters of a bar, and of a curve."""
_LEVELS = "▁▂▃▄▅▆▇█"
_ROLES = ("prefill", "decode", "both")
_STATES = {"ready": "green", "draining": "yellow", "ejected": "yellow"}
_MOST_TENANTS = 5
_WIDE = 100
"""The columns from which there is room for all figures of a worker."""


def frame(
    ring: RingFigures,
    title: str,
    rates: Mapping[str, WorkerRates] = MappingProxyType({}),
    *,
    columns: int = 110,
    lines: int | None = None,
    failure: str = "",
) -> Group:
    """The ring in so many columns, 80 at least, and at most ``lines`` lines (None: as many as it takes).
    ``rates``: of workers, by address. ``failure``: why these figures are no longer new."""
    head = Text.assemble(("baton top", "bold"), f"  {title}", no_wrap=True, overflow="ellipsis")
    if failure:
        head.append(f"  {failure}", "bold red")
    return Group(head, *_figures(ring), Text(), _workers(ring.workers, rates, columns, lines))


def _figures(ring: RingFigures) -> Iterator[Text]:
    last = ring.points[-1] if ring.points else None
    yield _line(
        "requests",
        f"{ring.in_flight:.0f} in flight, {ring.waiting:.0f} waiting, {count_text(ring.answers)} answered"
        f"{_tenants(ring)}",
    )
    tokens, prompt = ([getattr(one, name) for one in ring.points] for name in ("token_rate", "prompt_rate"))
    yield _line("tokens/s", f"{_rate(tokens)} generated", curve(tokens), count_text(ring.generated_tokens))
    yield _line("", f"{_rate(prompt)} of prompts", curve(prompt), count_text(ring.prompt_tokens))
    yield _line("latency", _latency(last))


def _line(name: str, says: str, drawn: str = "", total: str = "") -> Text:
    says = f"{says:<20}" if drawn else says
    line = Text.assemble((f"{name:<10}", "bold"), says, no_wrap=True, overflow="ellipsis")
    if drawn:
        line.append(f"  {drawn:<{_SPARKS}}", "cyan")
        line.append(f"  {total} in all")
    return line


def _tenants(ring: RingFigures) -> str:
    waiting = sorted((one for one in ring.tenants if one.waiting), key=lambda one: -one.waiting)
    shown = [f"{one.tenant} {one.waiting:.0f}" for one in waiting[:_MOST_TENANTS]]
    if len(waiting) > _MOST_TENANTS:
        shown.append(f"{len(waiting) - _MOST_TENANTS} others")
    return f" (queue: {', '.join(shown)})" if shown else ""


def _rate(rates: Sequence[float]) -> str:
    return count_text(rates[-1]) if rates else "-"


def _latency(last: PointFigures | None) -> str:
    def quantiles(name: str, p50: float | None, p99: float | None) -> str:
        return f"{name} p50 {_ms(p50)}, p99 {_ms(p99)}"

    if last is None:
        return "TTFT -    ITL -"
    ttft = quantiles("TTFT", last.ttft_p50, last.ttft_p99)
    return f"{ttft}    {quantiles('ITL', last.itl_p50, last.itl_p99)}"


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value / 1e3:.2f} s" if value >= 1e3 else f"{value:.3g} ms"


def count_text(value: float) -> str:
    """A count or rate in four characters or so: ``950``, ``1.2k``, ``34M``."""
    for unit in ("", "k", "M", "G"):
        if abs(value) < 999.5 or unit == "G":
            break
        value /= 1e3
    return f"{value:.1f}{unit}" if abs(value) < 9.95 and value % 1 else f"{value:.0f}{unit}"


def curve(values: Sequence[float]) -> str:
    """The last values as a line of blocks, the highest of them full; empty without values."""
    shown = values[-_SPARKS:]
    most = max(shown, default=0.0)
    steps = len(_LEVELS) - 1
    return "".join(_LEVELS[round(steps * max(0.0, value) / most) if most > 0 else 0] for value in shown)


def bar(worker: WorkerFigures) -> Text:
    """The blocks of a worker's pool: held, cached, free."""
    if not worker.blocks:
        return Text("-")
    held = round(_BAR * worker.blocks_held / worker.blocks)
    used = round(_BAR * (worker.blocks_held + worker.blocks_cached) / worker.blocks)
    share = f"{100 * worker.blocks_held / worker.blocks:3.0f} %"
    drawn = Text.assemble(("█" * held, "cyan"), ("▒" * (used - held), "blue"), ("░" * (_BAR - used), "dim"))
    return drawn.append(f" {share}")


def _workers(
    workers: Sequence[WorkerFigures], rates: Mapping[str, WorkerRates], columns: int, lines: int | None
) -> Table | Text:
    if not workers:
        return Text("no workers: the router waits for them", "yellow")
    room = len(workers) if lines is None else max(1, lines - HEAD_LINES - 1)
    several = len({one.model for one in workers}) > 1
    wide = columns >= _WIDE
    table = Table(box=None, padding=(0, 2 if wide else 1, 0, 0), header_style="bold")
    for name in ("role", "worker", *(["model"] if several else []), "state"):
        table.add_column(name, no_wrap=True)
    for name in ("run", "wait", "handoffs", *(["prompt/s"] if wide else []), "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("KV held", no_wrap=True)
    ordered = sorted(workers, key=_place)
    for role, group in groupby(ordered[:room], key=lambda one: one.role):
        for index, one in enumerate(group):
            model = [one.model] if several else []
            state = Text(one.state, _STATES.get(one.state, "bold red"))
            counts = (str(one.running), str(one.waiting), str(one.open_handoffs))
            done = _done(rates.get(one.address), wide)
            table.add_row("" if index else role, one.address, *model, state, *counts, *done, bar(one))
    if room < len(ordered):
        table.add_row("", f"… {len(ordered) - room} more")
    return table


def _done(rate: WorkerRates | None, wide: bool) -> list[str]:
    if rate is None:
        return ["-", "-"] if wide else ["-"]
    return [*([count_text(rate.prompt)] if wide else []), count_text(rate.generated)]


def _place(worker: WorkerFigures) -> tuple[int, str, str]:
    """The order of workers: by role, with those of unknown roles at the end, then by model and address."""
    role = _ROLES.index(worker.role) if worker.role in _ROLES else len(_ROLES)
    return role, worker.model, worker.address
