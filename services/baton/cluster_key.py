"""The key by which the services of one ring know each other, and which of them can do without. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from baton.options import ConfigError

LEAST_BYTES = 16
HOW = "make one with `openssl rand -hex 32`, and give it to all routers and workers (BATON_CLUSTER_KEY)"
OPEN_WARNING = (
    "there is no cluster key of %d bytes or more: whatever runs on this machine can call the workers as a "
    "router does; " + HOW
)
"""What a service logs once that starts without: with LEAST_BYTES."""


def suffices(key: str) -> bool:
    """Whether it is long enough for services on a network."""
    return len(key.encode()) >= LEAST_BYTES


def check_cluster_key(key: str, reached: Iterable[tuple[str, str]]) -> None:
    """ConfigError unless ``key`` suffices, or nothing but this machine is ``reached``: the hosts on which a
    service listens or that it calls, each with the words that a person gave it by."""
    if suffices(key):
        return
    for words, host in reached:
        if not is_loopback(host):
            raise ConfigError(
                "cluster_key", f"must have at least {LEAST_BYTES} bytes with {words}: {HOW}; or use 127.0.0.1"
            )


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
