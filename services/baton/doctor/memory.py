"""Memory, and the part of it that processes share by /dev/shm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from baton.doctor import cgroup, gpu
from baton.doctor.finding import Finding, lack, missing, note, ok
from baton.doctor.machine import Machine, size_text
from baton.doctor.wanted import Wanted
from baton.hub import DEMO, WEIGHT_FILES, resolve_model
from baton.transport.ucx_driver import SHARED_BYTES

ROUTER_BYTES, WORKER_BYTES = 256 << 20, 1 << 30
"""What a router and a worker need before they have served anything; a worker's without its weights."""
NCCL_BYTES = 1 << 30
"""What NVIDIA advises for /dev/shm where NCCL connects several GPUs."""
_DRIVERS = 2
"""The UCX workers of a worker: one for each way in which blocks are copied."""


def check(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    """Memory, the container's limit, and /dev/shm."""
    yield _memory(machine, wanted)
    if wanted.computes:
        yield _shared(machine, wanted)


def _memory(machine: Machine, wanted: Wanted) -> Finding:
    fields = dict(line.split(":", 1) for line in machine.read("/proc/meminfo").splitlines() if ":" in line)
    total, free = (int(fields.get(name, "0 kB").split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    says = f"{size_text(free)} of {size_text(total)} can be had"
    limit = cgroup.memory_limit(machine)
    if limit is not None and limit < total:
        free = min(free, limit - cgroup.memory_used(machine))
        says = f"{size_text(free)} of the container's {size_text(limit)} can be had"
    weights = _weights(wanted)
    in_host_memory = wanted.computes and not gpu.is_wanted(machine, wanted)
    needed = _needed(wanted) + (weights if in_host_memory else 0)
    whose = f"{wanted.role} with {wanted.worker.model}" if in_host_memory else wanted.role
    if free >= needed:
        return ok("memory", f"{says}; {whose} needs {size_text(needed)} before its KV blocks")
    do = "free some, raise the container's limit (resources.limits.memory), or serve a smaller model"
    return lack("memory", f"{says}, but {whose} needs {size_text(needed)} before its KV blocks", do)


def _needed(wanted: Wanted) -> int:
    router, workers = ROUTER_BYTES * wanted.routes, WORKER_BYTES * _workers(wanted)
    return router + workers


def _workers(wanted: Wanted) -> int:
    """The workers that share this machine: a ring has one of each role at least."""
    return {"ring": 2, "router": 0}.get(wanted.role, 1)


def _weights(wanted: Wanted) -> int:
    """The bytes of the model's weights on all workers here; 0 for a model that is not on this machine."""
    model = wanted.worker.model
    path = resolve_model(DEMO) if model == DEMO else Path(model).expanduser()
    found = (file.stat().st_size for pattern in WEIGHT_FILES for file in path.glob(pattern))
    return _workers(wanted) * sum(found)


def _shared(machine: Machine, wanted: Wanted) -> Finding:
    space = machine.space("/dev/shm")
    has_ucx = machine.version("ucxx-cu13") is not None and wanted.worker.connector in ("auto", "ucx")
    ucx = _workers(wanted) * _DRIVERS * SHARED_BYTES if has_ucx else 0
    one = ucx // max(1, _workers(wanted))
    do = (
        f"give it {size_text(max(NCCL_BYTES, ucx))}: shm.sizeLimit in the chart, --shm-size of docker run, "
        f"mount -o remount,size=1G /dev/shm elsewhere"
    )
    if space is None:
        return missing("/dev/shm", "is not there", do, needed=bool(ucx))
    says = f"{size_text(space.total)}, {size_text(space.free)} free"
    if space.free < one:
        what = f"{says}, but UCX takes {size_text(one)} for a worker, and leaves shared memory out without it"
        return lack("/dev/shm", what, do)
    if space.free < ucx:
        return note("/dev/shm", f"{says}, but UCX takes {size_text(ucx)} for the workers here", do)
    if gpu.count(machine) > 1 and space.free < NCCL_BYTES:
        return note("/dev/shm", f"{says}; NCCL between GPUs wants {size_text(NCCL_BYTES)}", do)
    return ok("/dev/shm", says + (f"; UCX takes {size_text(one)} for a worker" if ucx else "; not used"))
