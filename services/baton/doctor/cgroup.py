"""The limits that a container has by its control group, of either version."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from baton.doctor.machine import Machine

_ROOT = "/sys/fs/cgroup"
_UNLIMITED = 1 << 60
"""Version 1 writes a number of this size where there is no limit."""


def cpu_quota(machine: Machine) -> float | None:
    """The cores' worth of time that the group may use; None: no limit."""
    found: list[float] = []
    for folder in _folders(machine, "cpu"):
        quota, _, period = machine.read(f"{folder}/cpu.max").strip().partition(" ")
        if not quota:
            quota = machine.read(f"{folder}/cpu.cfs_quota_us").strip()
            period = machine.read(f"{folder}/cpu.cfs_period_us").strip()
        if quota.isdigit() and period.isdigit():
            found.append(int(quota) / int(period))
    return min(found, default=None)


def memory_limit(machine: Machine) -> int | None:
    """The most bytes that the group may use; None: no limit."""
    found = (
        machine.read(f"{folder}/{name}").strip()
        for folder in _folders(machine, "memory")
        for name in ("memory.max", "memory.limit_in_bytes")
    )
    return min((int(text) for text in found if text.isdigit() and int(text) < _UNLIMITED), default=None)


def memory_used(machine: Machine) -> int:
    """The bytes that the group uses without those of its page cache that can go; 0: it is not told."""
    for folder in _folders(machine, "memory"):
        for name, cache in (
            ("memory.current", "inactive_file"),
            ("memory.usage_in_bytes", "total_inactive_file"),
        ):
            used = machine.read(f"{folder}/{name}").strip()
            if used.isdigit():
                lines = machine.read(f"{folder}/memory.stat").splitlines()
                spare = next((line.split()[1] for line in lines if line.startswith(f"{cache} ")), "0")
                return max(0, int(used) - int(spare))
    return 0


def _folders(machine: Machine, controller: str) -> Iterator[str]:
    """The folders that may limit this process, from its own group up."""
    for line in machine.read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = f"{_ROOT}/{controller}" if controllers else _ROOT
        place = PurePosixPath(path)
        for group in (place, *place.parents):
            yield f"{top}{group}".rstrip("/")
