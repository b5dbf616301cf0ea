"""The connectors that move KV blocks, and RDMA devices."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from baton.doctor.finding import Finding, lack, missing, note, ok
from baton.doctor.machine import Machine, ProbeError
from baton.doctor.wanted import Wanted
from baton.transport.network_interface import rdma_ports
from baton.transport.registry import TRANSPORTS, Transport

_WAYS_TO_OTHERS = ("tcp", "rc", "dc", "ud", "gga")
"""How names of UCX's transports begin that reach another machine."""
_INFINIBAND = "/sys/class/infiniband"
_PROBED = ("ucx", "nixl")


def rdma_here(machine: Machine) -> bool:
    """Whether this machine shows an RDMA device."""
    return bool(rdma_ports(machine.path(_INFINIBAND)))


def rdma_in_reach(machine: Machine) -> bool:
    """Whether this process may open an RDMA device. A container sees its node's in ``/sys``, given or not."""
    return rdma_here(machine) and _has_verbs(machine)


def _has_verbs(machine: Machine) -> bool:
    return any(machine.path("/dev/infiniband").glob("uverbs*"))


def check(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    """The connectors that have a library of their own, and RDMA devices."""
    without: dict[str, str] = {}
    """What each connector that starts lacks for RDMA."""
    for name in _PROBED:
        transport, named = TRANSPORTS[name], wanted.worker.connector == name
        if not named and wanted.worker.connector != "auto":
            yield note(name, f"not used (--connector {wanted.worker.connector})")
        elif not named and transport.rdma and not rdma_here(machine):
            yield note(name, "not used: --connector auto takes it where there is an RDMA device")
        else:
            yield _connector(machine, wanted, name, transport, without)
    yield _rdma(machine, wanted, without)


def _connector(
    machine: Machine, wanted: Wanted, name: str, transport: Transport, without: dict[str, str]
) -> Finding:
    try:
        told = machine.probe("connector", name, wanted.host)
    except ProbeError as error:
        return lack(name, f"ends its process: {error}", f"give workers another --connector than {name}")
    if not told["installed"]:
        named = wanted.worker.connector == name
        do = f"pip install 'baton[{transport.extra}]' (Linux only)"
        return missing(name, "is not installed" + ("" if named else "; tcp stands in"), do, needed=named)
    if told["missing"]:
        return lack(name, f"{told['missing']}{_told_by_environment()}", _remedy(name))
    without[name] = str(told["missing_for_rdma"])
    return _started(name, str(told["transports"]).split())


def _started(name: str, transports: list[str]) -> Finding:
    """The finding about a connector that starts. ``transports``: UCX's names; empty: it does not tell."""
    if not transports:
        return ok(name, "starts")
    ways = [way for way in transports if way != "self"]
    if not ways:
        says = f"starts, but has no transport to another process, only self{_told_by_environment()}"
        return lack(name, says, _remedy(name))
    if not any(way.startswith(_WAYS_TO_OTHERS) for way in ways):
        says = f"starts with {', '.join(ways)}, which reach this node alone{_told_by_environment()}"
        return note(name, says, "add tcp to UCX_TLS where workers are on several nodes")
    return ok(name, f"starts with {', '.join(ways)}")


def _told_by_environment() -> str:
    told = [f"{key}={os.environ[key]}" for key in ("UCX_TLS", "UCX_NET_DEVICES") if key in os.environ]
    return f" ({', '.join(told)})" if told else ""


def _remedy(name: str) -> str:
    return (
        "unset UCX_TLS and UCX_NET_DEVICES, or name what is there, such as UCX_TLS=tcp,sm,self; else "
        f"give workers another --connector than {name}"
    )


def _rdma(machine: Machine, wanted: Wanted, without: Mapping[str, str]) -> Finding:
    needed = wanted.worker.require_rdma
    folder = machine.path(_INFINIBAND)
    ports = rdma_ports(folder)
    if not ports:
        do = (
            "load the adapter's driver on the node, and give the container the device: rdma.resource in the "
            "chart, --device /dev/infiniband of docker run"
        )
        says = "no device in /sys/class/infiniband" + (
            "" if needed else ": KV blocks go by TCP between nodes"
        )
        return missing("RDMA", says, do if needed else "", needed=needed)
    if not _has_verbs(machine):
        do = "give the container /dev/infiniband: rdma.resource in the chart, --device of docker run"
        says = f"{', '.join(ports)}, but no /dev/infiniband/uverbs* to reach them by"
        return missing("RDMA", says, do, needed=needed)
    states = {port: machine.read(f"{_INFINIBAND}/{port.replace(':', '/ports/')}/state") for port in ports}
    up = [port for port, state in states.items() if "ACTIVE" in state]
    if not up:
        do = "see to the cable, the switch and, for InfiniBand, the subnet manager (ibstat)"
        return missing("RDMA", f"{', '.join(ports)}, of which none is active", do, needed=needed)
    if all(without.values()):
        reasons = "; ".join(f"{name}: {why}" for name, why in without.items()) or "none starts"
        do = "pip install 'baton[nixl]', whose UCX has verbs, and libibverbs1 with its provider"
        says = f"active: {', '.join(up)}, but no connector moves KV blocks by it ({reasons})"
        return missing("RDMA", says, do, needed=needed)
    return ok("RDMA", f"active: {', '.join(up)}")
