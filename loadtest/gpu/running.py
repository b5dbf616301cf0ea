"""Running the parts: each in a process of its own, with a time limit, and all that it has started is ended
behind it.

The parent imports the standard library alone, so that nothing a part does to the device or to Python can
reach it. What a part and the processes that it starts print goes to ``<name>.log`` beside ``<name>.jsonl``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from loadtest.gpu import results
from loadtest.gpu.plan import LEAST_SECONDS, Part
from loadtest.gpu.results import Record, Results

ROOT = Path(__file__).parents[2]
CACHE = "triton-cache.tar.gz"
"""The name of the kernels that were built, in the folder of the results."""
SKIPPED_STATUS = 77
"""The exit status of a part that cannot be run here."""
TAIL = 12
"""The lines of a failed part's output that are shown."""


@dataclass(frozen=True)
class Call:
    """One call of the command: which parts, into which folder, and how long."""

    name: str
    """The stem of the files that the results go to."""
    parts: Sequence[Part]
    folder: Path
    tmp: Path
    """A folder for what the parts need in between: it is gone afterwards."""
    dry: bool
    seconds: float
    jobs: int = 1
    """Parts that run at once: more than one says nothing about speed."""
    began: float = field(default_factory=time.monotonic)

    @property
    def results(self) -> Path:
        return self.folder / f"{self.name}.jsonl"

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def left(self) -> float:
        """Return the seconds that are left."""
        return self.began + self.seconds - time.monotonic()


@dataclass(frozen=True)
class Outcome:
    """The end of a part."""

    part: Part
    status: str
    reason: str
    seconds: float

    def __str__(self) -> str:
        reason = f": {self.reason}" if self.reason else ""
        return f"{self.part.name:<18} {self.status:<8} {self.seconds:6.1f} s{reason}"


def run(call: Call) -> list[Outcome]:
    """Run the parts of a call, in order, and keep the kernels that were built."""
    with ending_together() as alive, ThreadPoolExecutor(call.jobs) as pool:
        outcomes = list(pool.map(lambda part: run_part(call, part, alive), call.parts))
    keep_cache(call)
    return outcomes


def run_part(call: Call, part: Part, alive: Alive) -> Outcome:
    """Run one part, and record how it ended."""
    results_of_part = Results(call.results, part.name)
    limit = min(part.limit, call.left)
    began = time.monotonic()
    if limit < min(LEAST_SECONDS, part.limit):
        outcome = Outcome(part, results.NOT_RUN, f"the call's {call.seconds:.0f} s were used up", 0.0)
    else:
        status, reason = _watched(call, part, limit, alive)
        outcome = Outcome(part, status, reason, time.monotonic() - began)
    ended: Record = {"status": outcome.status, "reason": outcome.reason, "seconds": round(outcome.seconds, 2)}
    results_of_part.write("end", ended)
    if part.module == "builds":
        keep_cache(call)  # the call may be ended from outside
    print(outcome, flush=True)
    return outcome


def _watched(call: Call, part: Part, limit: float, alive: Alive) -> tuple[str, str]:
    log = call.log if call.jobs == 1 else call.folder / f"{call.name}.{part.name}.log"
    argv = [sys.executable, "-m", "loadtest.gpu.child", part.name, str(call.results), str(call.tmp)]
    argv += [f"{limit:.1f}", *(["--dry-run"] if call.dry else [])]
    with log.open("ab") as output:
        output.write(f"\n=== {part.name}\n".encode())
        output.flush()
        start = output.tell()
        child = subprocess.Popen(
            argv,
            cwd=ROOT,
            env=environment(call, part),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # it and all that it starts are one group, which is ended as one
        )
    alive.add(child.pid)
    Results(call.results, part.name).write("begin", {"pid": child.pid, "limit": round(limit, 1)})
    try:
        status = child.wait(limit)
    except subprocess.TimeoutExpired:
        end_group(child.pid)
        child.wait()
        return results.TIMEOUT, f"its limit of {limit:.0f} s was over"
    finally:
        end_group(child.pid)
        alive.discard(child.pid)
    last = [line for line in log.read_bytes()[start:].decode(errors="replace").splitlines() if line.strip()]
    if status == 0:
        return results.OK, ""
    if status == SKIPPED_STATUS:
        return results.SKIPPED, last[-1] if last else ""
    print("\n".join(f"    {line}" for line in last[-TAIL:]), flush=True)
    if status < 0:
        return results.KILLED, f"ended by {signal.Signals(-status).name}"
    return results.FAILED, last[-1] if last else f"exit status {status}"


def environment(call: Call, part: Part) -> dict[str, str]:
    """Return the environment of a part: the sources are found, and what it prints comes out at once."""
    sources = [str(ROOT / "services"), str(ROOT / "kernels"), str(ROOT)]
    own = {
        "PYTHONPATH": os.pathsep.join([*sources, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if call.dry:  # one thread a process: the parts share what cores there are
        own |= {"OMP_NUM_THREADS": "1", "BATON_CPU_KERNELS": "plain"}
    return {"TRITON_CACHE_DIR": str(cache_folder(call.tmp)), **os.environ, **own, **part.environment}


def cache_folder(tmp: Path) -> Path:
    """Return where the kernels go that are built: ``TRITON_CACHE_DIR``, or else a folder of this call."""
    return Path(os.environ.get("TRITON_CACHE_DIR", tmp / "triton-cache"))


def keep_cache(call: Call) -> None:
    """Pack the kernels that were built into the folder of the results, for a later call."""
    cache = cache_folder(call.tmp)
    if cache.is_dir() and any(cache.iterdir()):
        with tarfile.open(call.folder / CACHE, "w:gz", compresslevel=3) as packed:
            packed.add(cache, ".")


def unpack_cache(file: Path, tmp: Path) -> None:
    """Unpack the kernels of an earlier call."""
    cache = cache_folder(tmp)
    cache.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file) as packed:
        packed.extractall(cache, filter="data")


class Alive:
    """The process groups of the parts that run. After ``end`` none is left, and none is let in."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: set[int] = set()
        self._over = False

    def add(self, group: int) -> None:
        with self._lock:
            self._groups.add(group)
            if self._over:
                end_group(group)

    def discard(self, group: int) -> None:
        with self._lock:
            self._groups.discard(group)

    def end(self) -> None:
        with self._lock:
            self._over = True
            for group in self._groups:
                end_group(group)


@contextmanager
def ending_together() -> Iterator[Alive]:
    """Within, the parts end when this process is told to."""
    alive = Alive()

    def stop(number: int, frame: FrameType | None) -> None:
        alive.end()
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield alive
    finally:
        alive.end()
        for number, handler in before.items():
            signal.signal(number, handler)


def end_group(group: int) -> None:
    """Kill all processes of a group that are left."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
