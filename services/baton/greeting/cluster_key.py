"""The key by which the services of a cluster know each other, and which services need none. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, field

from baton.process.options import ConfigError

MIN_BYTES = 16
HOW = "make one with `openssl rand -hex 32`, and give it to all routers and workers (BATON_CLUSTER_KEY)"
OPEN_WARNING = (
    "there is no cluster key of %d bytes or more: whatever runs on this machine can call the workers as a "
    "router does; " + HOW
)
"""The warning, formatted with MIN_BYTES, that a service without a key logs once at its start."""


@dataclass(frozen=True, slots=True)
class ClusterKeys:
    """The cluster key, and the one before it, which is accepted as well while the key is replaced."""

    current: bytes = field(default=b"", repr=False)
    """Empty on a machine of its own."""
    previous: bytes = field(default=b"", repr=False)
    """Empty: only ``current`` is accepted."""

    @property
    def accepted(self) -> tuple[bytes, ...]:
        """The keys that a peer may prove, ``current`` first."""
        return (self.current, self.previous) if self.previous else (self.current,)


def suffices(key: str) -> bool:
    """Whether ``key`` is long enough for services on a network."""
    return len(key.encode()) >= MIN_BYTES


def check_cluster_key(key: str, reached: Iterable[tuple[str, str]]) -> None:
    """Raises ConfigError unless ``key`` suffices or every host in ``reached`` is this machine. ``reached``:
    the hosts on which a service listens or that it calls, each after the option that names it, for the
    error."""
    if suffices(key):
        return
    for words, host in reached:
        if not is_loopback(host):
            raise ConfigError(
                "cluster_key", f"must have at least {MIN_BYTES} bytes with {words}: {HOW}; or use 127.0.0.1"
            )


def check_previous_key(current: str, previous: str) -> None:
    """Raises ConfigError unless ``previous`` is empty, or a key that may be accepted beside ``current``."""
    if previous and not current:
        raise ConfigError("cluster_key_previous", "needs a --cluster-key, which replaces it")
    if previous and not suffices(previous):
        raise ConfigError("cluster_key_previous", f"must have at least {MIN_BYTES} bytes, or be left out")


def is_loopback(host: str) -> bool:
    """Whether ``host`` can be reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
