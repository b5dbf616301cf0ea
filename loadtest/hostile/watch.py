"""The memory, processor time and files of processes, as the system counts them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import psutil

from loadtest.hostile.vocabulary import MIB, Watched

LOOK_S = 0.05
CHILDREN_S = 0.3
"""The time between looks for new processes, in seconds: these looks cost more."""
_PAGE = os.sysconf("SC_PAGE_SIZE")


def rss_of(pid: int) -> float:
    """Return the resident memory in MiB; 0 for a process that has gone."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE / MIB
    return 0.0


def _descriptors_of(pid: int) -> int:
    with suppress(OSError):
        return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    return 0


def _children_of(pid: int) -> list[int]:
    with suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return []


def _cpu_of(pids: list[int]) -> float:
    total = 0.0
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            times = psutil.Process(pid).cpu_times()
            total += times.user + times.system
    return total


def _threads_of(pid: int) -> int:
    with suppress(psutil.NoSuchProcess):
        return int(psutil.Process(pid).num_threads())
    return 0


class Watch:
    """A context manager that looks at a router and its workers again and again; ``seen`` is complete after
    it."""

    def __init__(self, router: int, workers: Mapping[str, int], log: Path) -> None:
        self._router = router
        self._workers = workers
        self._log = log
        self._before: dict[str, tuple[float, int]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watch")
        self.seen = Watched()

    def __enter__(self) -> Watch:
        children = _children_of(self._router)
        self.seen.rss_before = rss_of(self._router)
        self.seen.router_cpu_s = -_cpu_of([self._router, *children])
        self.seen.router_log_bytes = -self._log.stat().st_size
        self._before = {name: (rss_of(pid), _threads_of(pid)) for name, pid in self._workers.items()}
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        seen = self.seen
        seen.router_cpu_s += _cpu_of([self._router, *_children_of(self._router)])
        seen.router_log_bytes += self._log.stat().st_size
        named = {"router": self._router, **self._workers}
        seen.ended = [name for name, pid in named.items() if _has_ended(pid)]

    def _look(self) -> None:
        looked, children = 0.0, list[int]()
        while not self._stop.wait(LOOK_S):
            if time.monotonic() - looked > CHILDREN_S:
                looked, children = time.monotonic(), _children_of(self._router)
                self._look_at_workers()
            seen, own = self.seen, rss_of(self._router)
            theirs = sum(map(rss_of, children))
            seen.rss_peak = max(seen.rss_peak, own)
            seen.children_peak = max(seen.children_peak, theirs)
            seen.whole_peak = max(seen.whole_peak, own + theirs)
            seen.descriptors_peak = max(seen.descriptors_peak, _descriptors_of(self._router))

    def _look_at_workers(self) -> None:
        for name, pid in self._workers.items():
            rss, threads = self._before[name]
            self.seen.worker_grew = max(self.seen.worker_grew, rss_of(pid) - rss)
            grew = _threads_of(pid) - threads
            self.seen.worker_threads_grew = max(self.seen.worker_threads_grew, grew)


def _has_ended(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
