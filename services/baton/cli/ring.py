"""Turns what ``baton up`` was asked for into the child processes of a ring."""

from __future__ import annotations

import dataclasses
import os
import random
import secrets
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.cli.child import ChildSpec
from baton.core.role import Role
from baton.net import sockets
from baton.process.fields import to_argv
from baton.process.options import ConfigError, StartError, flag, join_address
from baton.router.config import RouterConfig
from baton.worker.config import WorkerConfig

CLUSTER_KEY = "BATON_CLUSTER_KEY"
"""The environment variable that holds the key: an argument would show in every process list."""

_PORTS = range(20000, 32000)
"""Below the ports that systems give to outgoing connections, so that nothing takes the port of a worker
between its death and its restart."""


@dataclass(frozen=True, slots=True)
class RingPlan:
    """Every process of a ring, with addresses chosen."""

    workers: Mapping[str, WorkerConfig]
    router: RouterConfig

    def specs(self) -> list[ChildSpec]:
        """The children to start: workers first, since they take longest."""
        workers = [
            ChildSpec(name, (*_python(), config.role, *arguments(config)), _environment(config))
            for name, config in self.workers.items()
        ]
        router = ChildSpec(
            "router", (*_python(), "router", *arguments(self.router)), _environment(self.router)
        )
        return [*workers, router]

    def describe(self) -> str:
        """One line on what is about to start."""
        counts = Counter(config.role for config in self.workers.values())
        roles = " + ".join(f"{count} {role}" for role, count in counts.items())
        worker = next(iter(self.workers.values()))
        worlds = {config.role: config.world for config in self.workers.values()}
        each = "worker"
        if len(set(worlds.values())) > 1:
            each = "process, " + ", ".join(f"{world} per {role} worker" for role, world in worlds.items())
        elif worker.world > 1:
            each = f"process, {worker.world} processes per worker"
        return f"{self.router.model_name}: {roles} + router, {worker.threads} CPU thread(s) per {each}"


def roles_wanted(prefill: int | None, decode: int | None, both: int) -> list[Role]:
    """A role per worker. One prefill and one decode unless something else was asked for."""
    default = 0 if both else 1
    prefill = default if prefill is None else prefill
    decode = default if decode is None else decode
    for option, count in (("prefill", prefill), ("decode", decode), ("both", both)):
        if not 0 <= count <= 64:
            raise ConfigError(option, f"must be between 0 and 64, not {count}")
    if not both and not (prefill and decode):
        raise ConfigError("prefill", "a ring needs a prefill and a decode worker, or one with --both")
    roles: list[Role] = ["prefill"] * prefill
    return roles + ["decode"] * decode + ["both"] * both


def with_ranks(
    worker: WorkerConfig, role: Role, tensor_parallel: int | None, pipeline_parallel: int | None
) -> WorkerConfig:
    """The pattern for workers of one role, split as its own options say; None: like all others."""
    own = {"tensor_parallel_size": tensor_parallel, "pipeline_parallel_size": pipeline_parallel}
    sizes = {option: size for option, size in own.items() if size is not None}
    try:
        return dataclasses.replace(worker, role=role, **sizes)  # type: ignore[arg-type]  # mypy sees a union
    except ConfigError as error:
        if error.option not in sizes:
            raise
        raise ConfigError(f"{role}_{error.option}", error.problem) from None


def plan(
    worker: WorkerConfig,
    roles: Sequence[Role],
    devices: Sequence[str],
    router: Mapping[str, Any],
    own: Mapping[Role, WorkerConfig] | None = None,
) -> RingPlan:
    """Give every worker its role, addresses, device and threads, and the router its workers.

    ``worker`` is the pattern for all of them, but for the roles that have their ``own``; devices are dealt
    out in turn, to each worker as many as it has processes; ``router`` holds the fields of RouterConfig that
    are not decided here.
    """
    ports = iter(_free_ports(worker.host, 2 * len(roles) + 2))
    key = os.environ.get(CLUSTER_KEY) or secrets.token_hex(32)
    patterns = [(own or {}).get(role, worker) for role in roles]
    processes = sum(pattern.world for pattern in patterns)
    workers = {
        name: dataclasses.replace(
            pattern,
            role=role,
            device=device,
            port=next(ports),
            metrics_port=next(ports),
            threads=worker.threads or max(1, _cores() // processes),
            cluster_key=key,
        )
        for name, role, pattern, device in zip(
            _names(roles), roles, patterns, _deal(devices, [one.world for one in patterns]), strict=True
        )
    }
    addresses = tuple(join_address(config.advertised_host, config.port) for config in workers.values())
    config = RouterConfig(workers=addresses, cluster_key=key, **router)
    _check_free("port", config.host, config.port)
    _check_free("grpc_port", config.host, config.grpc_port)
    # Ports are chosen here and not by the router, which must come back on the same ones.
    config = dataclasses.replace(
        config, port=config.port or next(ports), grpc_port=config.grpc_port or next(ports)
    )
    return RingPlan(workers, config)


def arguments(config: WorkerConfig | RouterConfig) -> list[str]:
    """The command-line options that make ``config`` again. The key travels in the environment, and the role
    is the command."""
    return ["--exit-with-parent", str(os.getpid()), *to_argv(config)]


def _deal(devices: Sequence[str], worlds: Sequence[int]) -> list[str]:
    """The first device of each worker, whose processes, ``worlds`` of them, take those that follow it. Behind
    the last device comes the first again. One that is named alone is the first of every worker."""
    if len(devices) == 1:
        return [devices[0]] * len(worlds)
    dealt, at = [], 0
    for world in worlds:
        group = devices[at : at + world]
        if world > 1 and not _are_neighbours(group, world):
            problem = f"must be cuda:N, cuda:N+1, ... in groups of {world}, one for each worker's processes"
            raise ConfigError("device", f"{problem}, not {','.join(devices)}")
        dealt.append(group[0])
        at = at + world if at + world < len(devices) else 0
    return dealt


def _are_neighbours(devices: Sequence[str], count: int) -> bool:
    numbers = [name.removeprefix("cuda:") for name in devices]
    first = int(numbers[0]) if numbers[0].isdecimal() else 0
    return numbers == [str(first + at) for at in range(count)]


def _names(roles: Sequence[Role]) -> list[str]:
    """``prefill`` where there is one of them, else ``prefill-0``, ``prefill-1``."""
    totals = Counter(roles)
    seen: Counter[str] = Counter()
    names = []
    for role in roles:
        names.append(role if totals[role] == 1 else f"{role}-{seen[role]}")
        seen[role] += 1
    return names


def _python() -> tuple[str, ...]:
    # -P: a directory called torch where the command was typed must not become our torch.
    return (sys.executable, "-P", "-m", "baton")


def _environment(config: WorkerConfig | RouterConfig) -> dict[str, str]:
    environment = {CLUSTER_KEY: config.cluster_key}
    if isinstance(config, WorkerConfig):
        # Thread pools are sized when a library is loaded, before the worker could say anything.
        environment["OMP_NUM_THREADS"] = str(config.threads)
    return environment


def _cores() -> int:
    """Cores this process may use, which in a container can be fewer than the machine has."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _check_free(option: str, host: str, port: int) -> None:
    """Say that a port is taken now, not after the model was loaded."""
    if port <= 0:
        return
    try:
        _listen_once(host, port)
    except OSError as error:
        where = join_address(host, port)
        raise StartError(f"{flag(option)}: cannot listen on {where}: {error.strerror}") from None


def _free_ports(host: str, count: int) -> list[int]:
    # A fixed seed would make two rings that start at once try the same ports in the same order.
    candidates = random.SystemRandom().sample(_PORTS, min(len(_PORTS), 50 * count))
    found = []
    for port in candidates:
        try:
            _listen_once(host, port)
        except OSError:
            continue
        found.append(port)
        if len(found) == count:
            return found
    raise StartError(f"found no {count} free ports on {host} between {_PORTS.start} and {_PORTS.stop}")


def _listen_once(host: str, port: int) -> None:
    """Raise OSError unless ``port`` can be listened on."""
    sockets.listen(host, port).close()
