"""How long a service that starts takes to end at SIGTERM, as process 1 of a container.

    python -m loadtest.sigterm_starts --repeats 20

Each start has a PID namespace of its own (``unshare``), in which the images' ENTRYPOINT is process 1. The
cache of kernels of a worker is empty, as in a fresh pod: it compiles. The end is that of process 1, with
which the kernel ends whatever else is in the namespace. Exit status 1 if one took longer than ``--allowed``
seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
MOMENTS = (0.05, 0.2, 1.0, 3.0)
"""The moments of SIGTERM, in seconds from the start of process 1."""
GIVEN_UP_S = 15.0
"""The time after which a start that has not ended is killed, in seconds."""
UNSHARE = ("unshare", "-Urpf", "--mount-proc", "--kill-child")
KEY = "a cluster key of a measurement"


@dataclass(slots=True)
class Ends:
    """The ends of one role at one moment."""

    seconds: list[float] = field(default_factory=list)
    """The times from SIGTERM to the end of process 1."""
    statuses: Counter[int] = field(default_factory=Counter)


def entrypoint(image: str) -> list[str]:
    """The ENTRYPOINT of an image: ``router`` or ``worker``."""
    lines = (ROOT / f"docker/{image}.Dockerfile").read_text().splitlines()
    [line] = [line for line in lines if line.startswith("ENTRYPOINT ")]
    found: list[str] = json.loads(line.removeprefix("ENTRYPOINT "))
    return found


@contextmanager
def command_of_this_tree() -> Iterator[Path]:
    """A folder with the command ``baton`` in it, as pip would write it for this tree."""
    module, _, function = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"][
        "baton"
    ].partition(":")
    with tempfile.TemporaryDirectory(prefix="baton-starts-") as folder:
        script = Path(folder) / "baton"
        script.write_text(
            f"#!{sys.executable}\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n"
        )
        script.chmod(0o755)
        yield Path(folder)


@contextmanager
def silent_server() -> Iterator[int]:
    """A port on which whoever calls is never answered, as by a leader or an API server that hangs."""
    held: list[socket.socket] = []

    def accept() -> None:
        while True:
            try:
                held.append(server.accept()[0])
            except OSError:
                return

    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield int(server.getsockname()[1])
        server.shutdown(socket.SHUT_RDWR)
    thread.join()
    for each in held:
        each.close()


def roles(folder: Path, silent: int) -> dict[str, tuple[str, list[str]]]:
    """The roles, each with its image and arguments. ``silent``: a port that answers nothing."""
    config = folder / "kubeconfig"
    user, where = {"name": "u", "user": {"token": "t"}}, {"cluster": "c", "user": "u"}
    cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{silent}"}}
    context = {"name": "x", "context": where}
    described = {"clusters": [cluster], "users": [user], "contexts": [context], "current-context": "x"}
    config.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config", **described}))
    any_port = ["--port", "0", "--metrics-port", "0"]
    planned = ["--prometheus-url", f"http://127.0.0.1:{silent}", "--ttft-target-ms", "500"]
    planned += ["--itl-target-ms", "50", "--gpu-budget", "4", "--prefill-deployment", "p"]
    planned += ["--decode-deployment", "d", "--kubeconfig", str(config), "--metrics-port", "0"]
    led = ["--leader-address", "127.0.0.1", "--node-port", str(silent), "--nodes", "2", "--node-index", "1"]
    alone = ["--worker", f"127.0.0.1:{silent}", "--port", "0", "--grpc-port", "0"]
    return {
        "router": ("router", ["router", *alone]),
        "router, 2 processes": ("router", ["router", *alone, "--processes", "2"]),
        "worker-sim": ("router", ["worker-sim", *any_port]),
        "planner": ("router", ["planner", *planned]),
        "prefill": ("worker", ["prefill", *any_port]),
        "decode": ("worker", ["decode", *any_port]),
        "both": ("worker", ["both", *any_port]),
        "decode, 2 ranks": ("worker", ["decode", *any_port, "--tensor-parallel-size", "2"]),
        "node": ("worker", ["node", *led]),
        "up": ("worker", ["up", "--port", "0", "--grpc-port", "-1"]),
    }


def end_of(command: Sequence[str], path: Path, moment: float) -> tuple[float, int]:
    """Start ``command`` as process 1 of a namespace, and send it SIGTERM after ``moment`` seconds. Returns
    the seconds that it then took to end, and its exit status."""
    with tempfile.TemporaryDirectory(prefix="baton-cache-") as cache:
        environment = {
            **os.environ,
            "PATH": f"{path}:{os.environ['PATH']}",
            "BATON_CLUSTER_KEY": KEY,
            "BATON_CACHE_DIR": cache,
        }
        outside = subprocess.Popen(
            [*UNSHARE, *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            first = _process_1(outside.pid)
            time.sleep(moment)
            began = time.monotonic()
            os.kill(first, signal.SIGTERM)
            status = outside.wait(GIVEN_UP_S)
        except subprocess.TimeoutExpired:
            status = -signal.SIGKILL
        finally:
            took = time.monotonic() - began
            outside.kill()  # and process 1 with it: --kill-child
            outside.wait()
        return took, status


def _process_1(outside: int) -> int:
    """Wait until ``unshare`` has become its command. Returns that process's id out here."""
    children, until = Path(f"/proc/{outside}/task/{outside}/children"), time.monotonic() + GIVEN_UP_S
    while time.monotonic() < until:
        for child in children.read_text().split():
            if Path(f"/proc/{child}/comm").read_text().strip() != "unshare":
                return int(child)
        time.sleep(0.001)
    raise RuntimeError("unshare starts nothing: may this user make namespaces?")


def measure(wanted: Sequence[str], moments: Sequence[float], repeats: int) -> dict[tuple[str, float], Ends]:
    """Try each role of ``wanted`` (all: empty) at each moment, ``repeats`` times, in rounds."""
    found: dict[tuple[str, float], Ends] = {}
    with command_of_this_tree() as folder, silent_server() as silent:
        known = roles(folder, silent)
        if unknown := [role for role in wanted if role not in known]:
            raise SystemExit(f"--role: must be one of {', '.join(known)}, not {unknown[0]!r}")
        for _ in range(repeats):
            for role in wanted or known:
                image, arguments = known[role]
                for moment in moments:
                    took, status = end_of([*entrypoint(image), *arguments], folder, moment)
                    ends = found.setdefault((role, moment), Ends())
                    ends.seconds.append(took)
                    ends.statuses[status] += 1
    return found


def table(found: dict[tuple[str, float], Ends]) -> str:
    """A Markdown table of the longest times."""
    lines = ["| role | SIGTERM after, s | n | longest, s | exit statuses |", "|---|---:|---:|---:|---|"]
    for (role, moment), ends in found.items():
        statuses = ", ".join(f"{status}: {n}" for status, n in sorted(ends.statuses.items()))
        longest = max(ends.seconds)
        lines.append(f"| {role} | {moment:g} | {len(ends.seconds)} | {longest:.3f} | {statuses} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--role", action="append", default=[], help="one of the table; default: all")
    parser.add_argument("--moment", action="append", type=float, default=[], help="seconds; default: several")
    parser.add_argument("--allowed", type=float, default=1.0, help="seconds that an end may take")
    given = parser.parse_args()
    for program in ("unshare", "tini"):
        if shutil.which(program) is None:
            raise SystemExit(f"{program} is missing (on Debian: apt-get install util-linux tini)")
    load = os.getloadavg()[0]
    found = measure(given.role, given.moment or MOMENTS, given.repeats)
    print(table(found))
    print(f"\nload of the machine: {load:.1f} before, {os.getloadavg()[0]:.1f} after; {os.cpu_count()} cores")
    if max(max(ends.seconds) for ends in found.values()) > given.allowed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
