"""The connectors by name, which of them a worker has, and which one a pair of workers uses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Literal

from baton.net.certificates import TlsFiles
from baton.transport.base import Connector, ConnectorMissingError, ConnectorSettings, RdmaCapable
from baton.transport.network_interface import rdma_ports

log = logging.getLogger(__name__)

ENCRYPTION = "TLS 1.3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """The entry of a connector: where it is imported from, and what it needs."""

    make: str
    """The module and attribute of the function from ``ConnectorSettings`` to the ``Connector``, imported when
    the connector is made."""
    preference: int
    """The connector's rank among the connectors that ``auto`` offers; the lowest goes first."""
    pool: Literal["any", "host", "device"] = "any"
    """The memory that the KV pool must be in."""
    sibling: str | None = None
    """The connector that the name stands for where the pool is in another memory."""
    package: str | None = None
    """The package that the connector needs beside Baton's own requirements."""
    extra: str | None = None
    """The extra of the package baton that brings ``package``."""
    rdma: bool = False
    """Whether ``auto`` offers the connector only where there is an RDMA device."""
    without: str | None = None
    """The connector that ``auto`` does not offer beside this one, as a process cannot have both."""
    encrypts: bool = False
    """Whether the connector encrypts when the services have certificates."""

    def takes(self, device: int | None) -> bool:
        """Whether the connector moves the blocks of a pool on ``device`` (None: in host memory)."""
        return self.pool == "any" or self.pool == ("host" if device is None else "device")


TRANSPORTS: Mapping[str, Transport] = MappingProxyType(
    {
        # UCX goes before the others but NIXL: it needs no host memory in between.
        "ucx": Transport(make="baton.transport.ucx:ucx", preference=1, package="ucxx", extra="ucx"),
        # NIXL goes first between workers that both have RDMA, as PyPI's UCX has no verbs. Elsewhere it brings
        # nothing that UCX has not, which on one host reads the peer's memory and can stop.
        # Each of the two loads a UCX of its own; in one process they end it.
        "nixl": Transport(
            make="baton.transport.nixl:nixl",
            preference=0,
            package="nixl_cu13",
            extra="nixl",
            rdma=True,
            without="ucx",
        ),
        "nccl": Transport(
            make="baton.transport.torch_group:nccl", preference=2, pool="device", sibling="gloo"
        ),
        # Gloo goes last: it is there for tests.
        "gloo": Transport(make="baton.transport.torch_group:gloo", preference=4, pool="host", sibling="nccl"),
        "tcp": Transport(make="baton.transport.tcp:tcp", preference=3, encrypts=True),
    }
)
"""The connectors by name, in the order in which options name them."""


def encryption(wanted: str, tls: TlsFiles | None) -> str:
    """Return what protects KV blocks on their way; empty: nothing. ``wanted`` and ``tls`` as ``available``
    takes them."""
    encrypts = wanted == "auto" or TRANSPORTS[wanted].encrypts
    return ENCRYPTION if tls is not None and encrypts else ""


def available(wanted: str, settings: ConnectorSettings) -> dict[str, Connector]:
    """Return the connectors that ``wanted`` ("auto" or one of ``TRANSPORTS``) means, the best first.

    Where the services have certificates, ``auto`` is the connectors that encrypt, and any other must be asked
    for by its name. Without certificates, ``auto`` is every connector that works here. With
    ``settings.require_rdma``, it is only those that move blocks by RDMA here. Raises ConnectorMissingError
    for a connector that is asked for by name and not available, or where none is left, and ConfigError for
    certificates that cannot be used here.
    """
    if wanted != "auto":
        name = _for_pool(wanted, settings.device)
        found = {name: _made(name, settings)}
    else:
        found = _all_made(settings)
    return _with_rdma(found) if settings.require_rdma else found


def _with_rdma(found: Mapping[str, Connector]) -> dict[str, Connector]:
    """Return those of these connectors that move blocks by RDMA here. Raises ConnectorMissingError, which
    says what each lacks, if there are none."""
    missing = {name: missing_for_rdma(connector) for name, connector in found.items()}
    kept = {name: connector for name, connector in found.items() if not missing[name]}
    reasons = "; ".join(f"{name}: {reason}" for name, reason in missing.items() if reason)
    if not kept:
        raise ConnectorMissingError(f"--require-rdma: no connector here has RDMA ({reasons})")
    if reasons:
        log.info("without RDMA, and not offered: %s", reasons)
    return kept


def missing_for_rdma(connector: Connector) -> str:
    """What a connector lacks to move blocks by RDMA here; empty: nothing."""
    return connector.missing_for_rdma if isinstance(connector, RdmaCapable) else "it never has"


def _all_made(settings: ConnectorSettings) -> dict[str, Connector]:
    found: dict[str, Connector] = {}
    for name in sorted(TRANSPORTS, key=lambda name: TRANSPORTS[name].preference):
        transport = TRANSPORTS[name]
        if not transport.takes(settings.device) or (settings.tls is not None and not transport.encrypts):
            continue
        if transport.rdma and not rdma_ports():
            continue
        if rivals := [other for other in found if TRANSPORTS[other].without == name]:
            log.info("without the connector %s: a process that has %s cannot have it", name, rivals[0])
            continue
        try:
            found[name] = _made(name, settings)
        except ConnectorMissingError as error:
            log.info("without the connector %s: %s", name, error)
    return found


def _for_pool(wanted: str, device: int | None) -> str:
    transport = TRANSPORTS[wanted]
    return wanted if transport.takes(device) or transport.sibling is None else transport.sibling


def _made(name: str, settings: ConnectorSettings) -> Connector:
    transport = TRANSPORTS[name]
    try:
        make: Callable[[ConnectorSettings], Connector] = resolve_name(transport.make)
        return make(settings)
    except ImportError as error:
        if transport.package is None:
            raise
        reason = f"the connector {name} needs {transport.package}: pip install 'baton[{transport.extra}]'"
        raise ConnectorMissingError(f"{reason} ({error})") from error


def first_common(offered: Sequence[str], ours: Collection[str]) -> str | None:
    """Return the first of the peer's connectors, the best first, that is available here too."""
    return next((name for name in offered if name in ours), None)
