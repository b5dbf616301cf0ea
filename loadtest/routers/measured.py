"""One run of the client, and the router's processor time meanwhile."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import IO

import msgspec

from loadtest.routers import fleet
from loadtest.routers.client import Figures, Plan
from loadtest.routers.fronts import Front
from loadtest.routers.stolen import Stolen


@dataclass(frozen=True)
class Measured:
    """One run of the client."""

    figures: Figures
    cpu_s: float
    """The router's processor time."""
    stolen: Stolen
    """The time that other guests of the host had meanwhile."""

    @property
    def busy(self) -> float:
        """The share of a core that the router used."""
        return self.cpu_s / self.figures.seconds

    @property
    def tokens_per_core_s(self) -> float:
        return self.figures.events / self.cpu_s

    @property
    def requests_per_core_s(self) -> float:
        return self.figures.finished / self.cpu_s


def measure(front: Front, plan: Plan) -> Measured:
    """Run the client, and read the router's processor time while it measured."""
    plan = msgspec.structs.replace(plan, path=front.path, model=front.model, headers=dict(front.headers))
    with fleet.on_core(fleet.OTHERS_CORE):
        client = subprocess.Popen(
            [sys.executable, "-m", "loadtest.routers.client", *front.urls],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    assert client.stdin is not None
    assert client.stdout is not None
    assert client.stderr is not None
    client.stdin.write(msgspec.json.encode(plan))
    client.stdin.close()
    _until(client.stderr, "BEGIN")
    with Stolen() as stolen:
        before = fleet.cpu_seconds(front.pids)
        _until(client.stderr, "END")
        used = fleet.cpu_seconds(front.pids) - before
    figures = msgspec.json.decode(client.stdout.read(), type=Figures)
    client.wait(30)
    return Measured(figures, used, stolen)


def _until(said: IO[bytes], awaited: str) -> None:
    """Read the client's standard error up to a word; other lines are passed on to ours."""
    for raw in said:
        word = raw.decode().strip()
        if word == awaited:
            return
        print(word, file=sys.stderr)


def steps_of(ms: float) -> bytes:
    """Return a profile whose steps all take as long."""
    nothing = {"step_row_ms": 0, "context_ms_per_1k": 0, "prefill_ms_per_1k": 0}
    return msgspec.json.encode({"step_base_ms": ms, **nothing})
