"""A drawing of a ring that comes up: the router, its workers, and what each of them is at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from rich.console import RenderableType
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

ROUTER = "router"
_READERS = "prefill"
_BAR = 24


@dataclass(slots=True)
class _Process:
    """What is known of one process."""

    stage: str = "starting"
    done: int = 0
    total: int = 0
    address: str | None = None
    seconds: float = 0.0
    spinner: Spinner = field(default_factory=lambda: Spinner("dots"))

    def mark(self) -> RenderableType:
        return Text("✓", "green") if self.address is not None else self.spinner

    def state(self) -> Text:
        if self.address is not None:
            return Text(f"ready on {self.address} after {self.seconds:.1f} s", "green")
        share = f" {100 * self.done // self.total} %" if self.total else ""
        return Text(self.stage + share)

    def bar(self) -> RenderableType:
        if self.address is not None or not self.total:
            return Text()
        return ProgressBar(total=self.total, completed=self.done, width=_BAR)


class RingDrawing:
    """Draws itself when rich prints it: a row for each process, prefill workers above those that they hand
    over to."""

    def __init__(self) -> None:
        self._processes: dict[str, _Process] = {}

    def starting(self, name: str) -> None:
        """A process was started, maybe again."""
        self._processes[name] = _Process()

    def progress(self, name: str, stage: str, done: int, total: int) -> None:
        """A process is in this stage, so far."""
        process = self._processes[name]
        process.stage, process.done, process.total = stage, done, total

    def ready(self, name: str, address: str, seconds: float) -> None:
        """A process is ready, so many seconds after it was started."""
        process = self._processes[name]
        process.address, process.seconds = address, seconds

    def __rich__(self) -> Table:
        table = Table.grid(padding=(0, 1))
        if ROUTER in self._processes:
            self._add(table, "client ══► ", ROUTER)
        for name, branch in self._workers():
            if name is None:
                table.add_row(Text(branch, "dim"))
            else:
                self._add(table, branch, name)
        return table

    def _workers(self) -> Iterator[tuple[str | None, str]]:
        """Workers with the line that leads to each; None: a line between two of them."""
        names = [name for name in self._processes if name != ROUTER]
        readers = [name for name in names if name.partition("-")[0] == _READERS]
        others = [name for name in names if name not in readers]
        for name in readers:
            yield name, "             ├─► "
        if readers and others:
            yield None, "             │      ║ KV blocks"
            yield None, "             │      ▼"
        for name in others:
            yield name, "             └─► " if name == others[-1] else "             ├─► "

    def _add(self, table: Table, branch: str, name: str) -> None:
        process = self._processes[name]
        label = Text.assemble((branch, "dim"), (name, "bold"))
        table.add_row(label, process.mark(), process.state(), process.bar())
