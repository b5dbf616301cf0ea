"""Every metric, panel and rule of Baton, with data in it.

    python -m loadtest.observed

Starts a ring of simulated workers with tenants, limits and more requests than it lets in, a real ring of the
demo model with a planner, and a Prometheus that scrapes all of them with the rules that Baton comes with.
Kills a worker meanwhile. Then asks for every panel of every dashboard and for the metrics of every rule. Exit
status 1 if a panel without an excuse stayed empty, a rule cannot be evaluated, or a target does not answer.
Needs Debian's prometheus; with redis-server routers share their limits.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from baton.process.ready import WorkerReady
from baton.router.security.keys import entry_line, new_key
from loadtest.conditions import conditions
from tests.support.planner_process import running_planner
from tests.support.pressure import Pressure, pressure
from tests.support.prometheus import (
    PROMETHEUS,
    Panel,
    Server,
    empty_panels,
    has_figures,
    panels,
    rules,
    running_prometheus,
    selectors_of_rules,
)
from tests.support.redis_server import PROGRAM as REDIS
from tests.support.redis_server import RedisServer
from tests.support.ring import Ring, running, running_ring, running_routers, simulated

LOOK_BACK = "15s"
EVERY = "1s"
PROFILE = {"step_base_ms": 12, "step_row_ms": 0.1, "context_ms_per_1k": 0.1, "prefill_ms_per_1k": 30}
NAME = ("--served-model-name", "simulated")
TARGETS = ("--slo-ttft", "0.3", "--slo-itl", "0.05")


@dataclass
class Seen:
    """The expressions that gave data at any time so far, and the number of answers."""

    empty: dict[Panel, str] = field(default_factory=dict)
    """Panels that never had all their data, with an expression that gave nothing."""
    looked: bool = False

    def look(self, server: Server) -> None:
        now = dict(empty_panels(server, LOOK_BACK))
        self.empty = {p: e for p, e in now.items() if not self.looked or p in self.empty}
        self.looked = True


def free_port() -> int:
    """Return a free port, so that a worker that comes back is where it was scraped."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def keys(tmp: Path) -> tuple[Path, list[str]]:
    given = [new_key() for _ in range(2)]
    lines = ["tenants:", "  red: {weight: 1}", "  green: {weight: 2}", "keys:"]
    lines += [entry_line(key, name, name) for key, name in zip(given, ("red", "green"), strict=True)]
    path = tmp / "keys.yaml"
    path.write_text("\n".join(lines) + "\n")
    return path, given


@contextmanager
def simulated_ring(tmp: Path, redis: str | None) -> Iterator[tuple[Ring, list[str]]]:
    """Start two prefill and three decode workers behind a router that lets few requests in."""
    profile = tmp / "profile.json"
    profile.write_text(json.dumps(PROFILE))
    options = (*NAME, "--profile", str(profile))
    workers = [
        simulated(tmp, f"{role}-{number}", role, *options, "--metrics-port", str(free_port()))
        for role, count in (("prefill", 2), ("decode", 3))
        for number in range(count)
    ]
    file, given = keys(tmp)
    router = [*NAME, *TARGETS, "--api-keys", str(file), "--limit-requests-per-minute", "100000"]
    router += ["--max-inflight", "6", "--queue-size", "4"]
    router += ["--redis-url", redis] if redis else []
    with running(workers), running_routers(tmp, "demo", {"simulated": workers}, router) as rings:
        yield rings["simulated"], given


def named(ring: Ring, prefix: str) -> dict[str, str]:
    """Return the addresses of a ring's metrics, each with the name of who is there."""
    found = {ring.url.removeprefix("http://"): f"{prefix}router"}
    for service in ring.workers:
        assert isinstance(service.ready, WorkerReady)
        assert service.ready.metrics is not None
        found[service.ready.metrics] = f"{prefix}{service.name}"
    return found


def addressed(ring: Ring, prefix: str) -> dict[str, str]:
    """Return the addresses of a ring's workers, each with its name."""
    found: dict[str, str] = {}
    for service in ring.workers:
        assert isinstance(service.ready, WorkerReady)
        found[service.ready.address] = f"{prefix}{service.name}"
    return found


@dataclass(frozen=True, slots=True)
class Observed:
    """Rings under load, and the Prometheus that scrapes them."""

    server: Server
    simulation: Ring
    loads: Sequence[Pressure]
    names: Mapping[str, str]
    """Each target's address → what runs there."""
    peers: Mapping[str, str]
    """The address at which workers call each other → who that is."""


@contextmanager
def observed(tmp: Path) -> Iterator[Observed]:
    """Start both rings, the planner and the Prometheus, and keep asking."""
    with ExitStack() as stack:
        redis = None
        if REDIS is not None:
            redis = RedisServer(tmp)
            redis.start()
            stack.callback(redis.kill)
        simulation, given = stack.enter_context(simulated_ring(tmp, redis.url if redis else None))
        real = stack.enter_context(
            running_ring(
                tmp / "real",
                options=("--host-kv-memory", "64MiB"),
                decode_options=("--speculative-method", "ngram"),
                router_options=TARGETS,
            )
        )
        planner = free_port()
        names = named(simulation, "sim-") | named(real, "") | {f"127.0.0.1:{planner}": "planner"}
        server = stack.enter_context(running_prometheus(tmp, list(names), every=EVERY))
        of_real = f'instance=~"{"|".join(named(real, ""))}"'
        stack.enter_context(running_planner(tmp, real, server.url, planner, of_real))
        loads = [
            stack.enter_context(pressure(simulation.url, at_once=14, max_tokens=48, keys=given)),
            stack.enter_context(pressure(real.url, at_once=2)),
        ]
        peers = addressed(simulation, "sim-") | addressed(real, "")
        yield Observed(server, simulation, loads, names, peers)


def watch(server: Server, ring: Ring, seconds: float) -> Seen:
    """Look again and again; a third of the way in, a decode worker dies and comes back."""
    seen = Seen()
    began = time.monotonic()
    time.sleep(min(10.0, seconds / 4))
    seen.look(server)
    victim = ring.of_role("decode")[0]
    time.sleep(max(0.0, began + seconds / 3 - time.monotonic()))
    victim.kill()
    time.sleep(3)
    seen.look(server)
    victim.start()
    victim.wait_ready()
    while time.monotonic() < began + seconds:
        time.sleep(2)
        seen.look(server)
    return seen


def report(server: Server, seen: Seen, loads: Sequence[Pressure], num_targets: int, console: Console) -> bool:
    shown = Table("dashboard", "panels", "with data", "empty, and why")
    bad: list[str] = []
    for dashboard in dict.fromkeys(panel.dashboard for panel in panels()):
        of = [panel for panel in panels(LOOK_BACK) if panel.dashboard == dashboard]
        empty = [panel for panel in of if panel in seen.empty]
        bad += [f"{panel}: {seen.empty[panel]}" for panel in empty if not panel.may_be_empty]
        why = "; ".join(f"{panel.title}: {panel.may_be_empty or 'NO REASON'}" for panel in empty)
        shown.add_row(dashboard, str(len(of)), str(len(of) - len(empty)), why)
    console.print(shown)
    selectors = selectors_of_rules()
    quiet = sorted(each for each in selectors if not server.query(each))
    recorded = [rule["record"] for rule in rules() if "record" in rule]
    unrecorded = [name for name in recorded if not has_figures(server.query(name))]
    firing = sorted({str(s["metric"]["alertname"]) for s in server.query("ALERTS")})  # type: ignore[index]
    up = server.targets_up()
    told = Table("", "")
    told.add_row("targets that answer", f"{up} of {num_targets}")
    told.add_row("rules that cannot be evaluated", str(server.broken_rules() or "none"))
    told.add_row("recorded", f"{len(recorded) - len(unrecorded)} of {len(recorded)}")
    told.add_row("what rules look at, with data", f"{len(selectors) - len(quiet)} of {len(selectors)}")
    told.add_row("not there, as it has not happened", ", ".join(quiet) or "none")
    told.add_row("alerts pending or firing", ", ".join(firing) or "none")
    told.add_row("answers by status", "; ".join(str(dict(load.statuses)) for load in loads))
    fine = not bad and up == num_targets and not server.broken_rules() and not unrecorded
    told.add_row("VERDICT", "ok" if fine else "FAILED")
    console.print(told)
    for each in (*bad, *(f"nothing is recorded as {name}" for name in unrecorded)):
        console.print(each, style="red", soft_wrap=True)
    return fine


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of load")
    chosen = parser.parse_args()
    if PROMETHEUS is None:
        print("NOT RUN: there is no prometheus here (apt-get install prometheus)", file=sys.stderr)
        return 1
    console = Console(width=140)
    for line in conditions("loadtest.observed"):
        console.print(line, soft_wrap=True)
    with tempfile.TemporaryDirectory() as scratch, observed(Path(scratch)) as run:
        seen = watch(run.server, run.simulation, chosen.seconds)
        return int(not report(run.server, seen, run.loads, len(run.names), console))


if __name__ == "__main__":
    sys.exit(main())
