"""Simulated workers, kept to their core, and the processor time of processes."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import psutil

from tests.support.ring import CLUSTER_KEY, Service, running, simulated

ROUTER_CORE = 0
OTHERS_CORE = 1
NOTHING_MORE: Mapping[str, str] = MappingProxyType({})


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """Keep processes that are started in this context on this core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def workers(
    tmp: Path, count: int, *options: str, environment: Mapping[str, str] = NOTHING_MORE
) -> Iterator[list[Service]]:
    """Start simulated workers that do both and serve a plain OpenAI API beside, all on one core. Each records
    when its tokens were there, in the file ``record`` of ``records``. ``environment``: the workers' own,
    beside ours."""
    fleet = [
        simulated(tmp, f"sim-{i}", "both", "--http-port", "0", "--record", str(tmp / f"record-{i}"), *options)
        for i in range(count)
    ]
    for worker in fleet:
        worker.environment = environment
    with on_core(OTHERS_CORE), running(fleet):
        yield fleet


@dataclass(frozen=True)
class FakeWorkers:
    """Workers of one process that only talk."""

    addresses: tuple[str, ...]
    urls: tuple[str, ...]
    """The URLs of their plain API."""


@contextmanager
def fake_workers(tmp: Path, count: int, step_ms: float) -> Iterator[FakeWorkers]:
    """Start ``loadtest.routers.fake_workers`` on the others' core, with its record."""
    argv = [sys.executable, "-m", "loadtest.routers.fake_workers", "--workers", str(count)]
    argv += ["--step-ms", str(step_ms), "--record", str(tmp / "record-0")]
    with on_core(OTHERS_CORE):
        environment = {**os.environ, "BATON_CLUSTER_KEY": CLUSTER_KEY}
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    try:
        found: list[list[str]] = []
        for line in process.stdout:
            if line.startswith("READY"):
                break
            found.append(line.split()[1:])
        if len(found) != count:
            raise RuntimeError(f"the fake workers ended with {process.wait(5)}")
        yield FakeWorkers(tuple(one for one, _ in found), tuple(f"http://{plain}" for _, plain in found))
    finally:
        process.kill()
        process.wait()


def plain_urls(fleet: Sequence[Service]) -> list[str]:
    """Return the addresses at which the workers serve other routers."""
    found = [re.search(r"OpenAI API at (http://\S+)", worker.log.read_text()) for worker in fleet]
    return [match[1] for match in found if match is not None]


def said_at(tmp: Path, since_ns: int) -> dict[tuple[str, int], int]:
    """Return when each (request, index of the token) was there, by all workers' records from a moment on."""
    told: dict[tuple[str, int], int] = {}
    for file in tmp.glob("record-*"):
        with file.open() as lines:
            for line in lines:
                fields = line.split()
                if len(fields) == 3 and int(fields[0]) >= since_ns:
                    told[fields[1], int(fields[2])] = int(fields[0])
    return told


def cpu_seconds(pids: Sequence[int]) -> float:
    """Return the processor time of these processes and their children so far, in seconds."""
    total = 0.0
    for pid in pids:
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def stolen_seconds() -> float:
    """Return the stolen time of all cores so far, in seconds: the time that the host gave to others while
    there was something to do here."""
    return float(psutil.cpu_times().steal)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
