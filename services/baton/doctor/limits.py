"""The limits of a process: open files, and memory that must not be moved."""

from __future__ import annotations

import resource
from collections.abc import Iterator

from baton.doctor.finding import Finding, lack, missing, note, ok
from baton.doctor.machine import Machine, size_text
from baton.doctor.transports import rdma_in_reach
from baton.doctor.wanted import Wanted
from baton.process.descriptors import MOST
from baton.router.api.http.server.slots import MAX_CONNECTIONS, SlotLimits

LEAST_FILES = 1024
"""The least descriptors of a service: streams to all peers, files of the model, libraries, clients."""
_IPC_LOCK = 1 << 14
"""The bit of CAP_IPC_LOCK, whose holder may lock any amount of memory."""


def check(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    """``ulimit -n`` and ``-l``."""
    yield _open_files(machine, wanted)
    if wanted.computes:
        yield _locked_memory(machine, wanted)


def _open_files(machine: Machine, wanted: Wanted) -> Finding:
    _, hard = machine.limit(resource.RLIMIT_NOFILE)
    limit = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    says = f"{limit} (the hard limit: services raise their own to it)"
    do = (
        "raise it: ulimit -Hn 65536 as root before the start, LimitNOFILE=65536 of a systemd unit, "
        "--ulimit nofile=65536 of docker run, the container runtime's own in Kubernetes"
    )
    if limit < LEAST_FILES:
        return lack("open files", f"{says}; a service needs {LEAST_FILES}", do)
    if wanted.routes:
        most = SlotLimits.of_descriptors(limit).total
        says += f"; a router takes {most} connections"
        if most < MAX_CONNECTIONS // 4:
            return note("open files", says, do)
    return ok("open files", says)


def _locked_memory(machine: Machine, wanted: Wanted) -> Finding:
    _, hard = machine.limit(resource.RLIMIT_MEMLOCK)
    if hard == resource.RLIM_INFINITY:
        return ok("locked memory", "without a limit")
    if _capabilities(machine) & _IPC_LOCK:
        return ok(
            "locked memory", f"the limit of {size_text(hard)} does not hold for this user (CAP_IPC_LOCK)"
        )
    says = f"{size_text(hard)}: an RDMA device reads KV blocks only in memory that is locked"
    do = (
        "ulimit -l unlimited as root before the start, LimitMEMLOCK=infinity of a systemd unit (of the "
        "container runtime's in Kubernetes), --ulimit memlock=-1 of docker run"
    )
    return missing("locked memory", says, do, needed=wanted.worker.require_rdma or rdma_in_reach(machine))


def _capabilities(machine: Machine) -> int:
    lines = machine.read("/proc/self/status").splitlines()
    return next((int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), 0)
