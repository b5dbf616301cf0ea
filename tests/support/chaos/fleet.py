"""A ring of several prefill and decode workers that are killed, stopped and started again where they were."""

from __future__ import annotations

import asyncio
import random
import re
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from baton.engine.kv.page_counts import PageCounts
from baton.models.config import ModelConfig
from baton_kernels.kv_layout import KVLayout
from tests.support.chaos.connections import between
from tests.support.ring import Ring, Service, scrape

EXIT_RETIRED = 75
ROLES = ("prefill", "decode")
PER_ROLE = 2
DATA_PORTS = 3
"""As many as a worker without CUDA has connectors."""
PORTS = range(12_000, 32_000, DATA_PORTS)
"""Below those that the system gives to outgoing connections: one of these could sit on a dead worker's."""
READY_S = 300.0
BLOCK_SIZE = 16
"""Tokens of a KV block, by default."""
ROOM = 1280
"""The tokens of a sequence that has all pages of a worker to itself. They are one or two of the longest
requests: there is never room for all."""
CHUNK = 64
OPTIONS = ("--prefill-chunk", str(CHUNK), "--max-num-batched-tokens", "192")

State = Literal["up", "frozen", "down"]


@dataclass(frozen=True)
class Usage:
    """What a process has open."""

    fds: Counter[str]
    """What they are open on, without numbers → how many."""
    threads: Counter[str]
    """By the names that the system has."""
    rss: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        status = Path(f"/proc/{pid}/status").read_text()
        rss = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert rss
        fds, threads = Counter[str](), Counter[str]()
        with suppress(FileNotFoundError):  # they come and go meanwhile
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                fds[re.sub(r"\d+", "", str(fd.readlink()))] += 1
        with suppress(FileNotFoundError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                threads[(task / "comm").read_text().strip()] += 1
        return cls(fds, threads, int(rss[1]) << 10)


@dataclass
class Member:
    """A worker, and what was done to it."""

    service: Service
    role: str
    grpc_port: int
    data_ports: range
    state: State = "up"
    at_first_rest: Usage | None = None
    """Of this process, when the ring was first at rest. None: it has started since."""

    @property
    def name(self) -> str:
        return self.service.name

    @property
    def pid(self) -> int:
        return self.service.process.pid

    async def restart(self) -> None:
        """Start the process again at its address; it must be dead."""
        await asyncio.to_thread(self.service.restart)
        self.state, self.at_first_rest = "up", None

    @property
    def ports(self) -> set[int]:
        """Those it listens on for peers."""
        return {self.grpc_port, *self.data_ports}

    def handoffs(self) -> int:
        """Completed by this process."""
        found = [v for k, v in self.service.metrics().items() if k.startswith("baton_handoffs_completed")]
        return int(found[0])

    def transfers(self) -> int:
        """Blocks that are being sent or received."""
        return int(self.service.metrics()[f'baton_handoff_held_blocks{{role="{self.role}"}}'])

    def events(self) -> Counter[str]:
        """Of this process: what it counts that is out of the ordinary."""
        found: Counter[str] = Counter()
        for name, value in self.service.metrics().items():
            reason = re.search(r'reason="(\w+)"', name)
            if reason:
                found[f"{reason[1]} ({self.role})"] += int(value)
            elif name.startswith(("baton_preemptions", "baton_handoff_stale_messages")):
                found[f"{name.partition('_total')[0].removeprefix('baton_')} ({self.role})"] += int(value)
        return +found

    def held(self) -> dict[str, int]:
        """What is not given back: blocks, handoffs and sequences, those that are not zero."""
        try:
            metrics = self.service.metrics()
        except OSError as error:
            return {f"no answer: {error}": 1}
        names = (
            "baton_handoffs_open",
            "baton_handoff_held_blocks",
            "baton_sequences_running",
            "baton_sequences_waiting",
        )
        of_role = f'{{role="{self.role}"'
        links, channels = (
            metrics[f"baton_handoff_{name}{of_role}}}"] for name in ("links", "control_channels")
        )
        account = {"blocks held": metrics[f'baton_kv_blocks{of_role},state="held"}}']}
        account |= {name: metrics[f"{name}{of_role}}}"] for name in names}
        account["control channels without a link"] = channels - links
        return {name: int(value) for name, value in account.items() if value}


@dataclass
class Log:
    """A service's log, read as it grows."""

    service: Service
    position: int = 0

    def size(self) -> int:
        return self.service.log.stat().st_size

    def since(self, position: int) -> bytes:
        with self.service.log.open("rb") as file:
            file.seek(position)
            return file.read()

    def records(self) -> list[str]:
        """What was written since this was last asked; a record may have several lines."""
        text = self.since(self.position)
        self.position += len(text)
        return re.split(r"\n(?=\d{4}-\d\d-\d\d )", text.decode(errors="replace"))


@dataclass
class Fleet:
    ring: Ring
    members: list[Member]
    rng: random.Random
    logs: dict[str, Log] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.logs = {s.name: Log(s) for s in (self.ring.router, *(m.service for m in self.members))}

    def of_role(self, role: str) -> list[Member]:
        return [m for m in self.members if m.role == role]

    def in_state(self, *states: State) -> list[Member]:
        return [m for m in self.members if m.state in states]

    def spare(self, member: Member) -> bool:
        """Whether another worker of the role is up."""
        return any(m is not member and m.state == "up" for m in self.of_role(member.role))

    def spare_connections(self) -> dict[str, int]:
        """Worker → the connections to decode workers' gRPC ports that are no link's, of every prefill worker
        that is up and has some."""
        decodes = [m for m in self.of_role("decode") if m.state == "up"]
        ports = {m.grpc_port for m in decodes}
        spare: dict[str, int] = {}
        for member in self.of_role("prefill"):
            if member.state != "up":
                continue
            made = sum(
                member.pid in each.pids and bool(ports & each.ports)
                for each in between([member.pid, *(m.pid for m in decodes)])
            )
            links = int(member.service.metrics()['baton_handoff_links{role="prefill"}'])
            if made != links:
                spare[member.name] = made - links
        return spare

    def router_metrics(self) -> dict[str, float]:
        return scrape(f"{self.ring.url}/metrics")


@contextmanager
def running_fleet(tmp: Path, model: Path, kind: str, rng: random.Random) -> Iterator[Fleet]:
    """``kind``: a connector, or ``ucx-shm`` or ``ucx-tcp`` for UCX over that alone. Several, as in tcp+gloo:
    one prefill worker for each, and decode workers that have them all."""
    tmp.mkdir(parents=True, exist_ok=True)
    ports = _free_ports()
    several = kind.split("+")
    connectors = {
        "prefill": several if len(several) > 1 else several * PER_ROLE,
        "decode": ["auto" if len(several) > 1 else kind] * PER_ROLE,
    }
    pages = pages_of(model)
    members = [
        _member(f"{role}-{index}", role, connector, model, tmp, ports, pages)
        for role in ROLES
        for index, connector in enumerate(connectors[role])
    ]
    workers = [flag for m in members for flag in ("--worker", f"127.0.0.1:{m.grpc_port}")]
    workers += ["--disaggregation", "always"]  # it is handoffs that are to be broken
    argv = ("router", "--model", str(model), "--port", str(next(ports)), "--grpc-port", "-1", *workers)
    router = Service("router", argv, tmp / "router.log")
    with ExitStack() as stack:
        for service in (*(m.service for m in members), router):
            service.log.write_text("")
            service.start()
            stack.callback(service.stop)
        for service in (*(m.service for m in members), router):
            service.wait_ready()
        ring = Ring(router, [m.service for m in members])
        ring.wait_workers(READY_S)
        yield Fleet(ring, members, rng)


def pages_of(model: Path, room: int = ROOM) -> int:
    """The pages that one sequence of ``room`` tokens takes, whichever groups of layers share them."""
    layout = KVLayout.of(ModelConfig.from_dir(model).kept(), BLOCK_SIZE, torch.float32.itemsize)
    return PageCounts(layout, CHUNK).of(room)


def _member(
    name: str, role: str, kind: str, model: Path, tmp: Path, ports: Iterator[int], pages: int
) -> Member:
    connector, _, transport = kind.partition("-")
    environment = {"UCX_TLS": {"shm": "posix,self", "tcp": "tcp"}[transport]} if transport else {}
    grpc, data, metrics = next(ports), next(ports), next(ports)
    where = ("--port", str(grpc), "--data-port", str(data), "--metrics-port", str(metrics))
    options = ("--dtype", "float32", "--threads", "1", "--connector", connector, "--verify-handoff", *OPTIONS)
    argv = (role, "--model", str(model), *where, *options, "--num-blocks", str(pages))
    service = Service(name, argv, tmp / f"{name}.log", environment=environment)
    return Member(service, role, grpc, range(data, data + DATA_PORTS))


def _free_ports() -> Iterator[int]:
    """Each with those that follow it. Not by a seed: another ring may be started with the same one."""
    for first in random.sample(PORTS, len(PORTS)):
        try:
            for port in range(first, first + DATA_PORTS):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        yield first
