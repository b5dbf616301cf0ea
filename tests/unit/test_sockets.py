"""One way to listen and one to dial, whatever the family of the address."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from baton.net import sockets
from baton.process.options import parse_address
from tests.support.ipv6 import needs_ipv6

HERE = [
    ("127.0.0.1", "127.0.0.1"),
    ("0.0.0.0", "127.0.0.1"),
    ("", "127.0.0.1"),
    ("localhost", "127.0.0.1"),
    pytest.param("::1", "::1", marks=needs_ipv6),
    pytest.param("::", "::1", marks=needs_ipv6),
]
"""What is listened on, and what is dialled for it."""


@contextmanager
def both(bound: str, called: str) -> Iterator[tuple[socket.socket, socket.socket, socket.socket]]:
    """A listener, and the two ends of a connection to it."""
    with sockets.listen(bound, 0) as listener:
        port = listener.getsockname()[1]
        with sockets.dial(called, port, 5) as calling, closing(listener.accept()[0]) as answering:
            yield listener, calling, answering


@pytest.mark.parametrize(("bound", "called"), HERE)
def test_who_dials_is_heard(bound: str, called: str) -> None:
    with both(bound, called) as (_, calling, answering):
        calling.sendall(b"x")
        assert answering.recv(2) == b"x"
        assert sockets.own_host(calling) == sockets.own_host(answering) == called


@needs_ipv6
@pytest.mark.skipif(
    not socket.has_dualstack_ipv6(), reason="NOT TESTED: this kernel keeps the families apart"
)
def test_the_wildcard_of_ipv6_is_that_of_both_families() -> None:
    with both("::", "127.0.0.1") as (listener, calling, answering):
        assert sockets.own_address(listener) == f"[::]:{listener.getsockname()[1]}"
        assert answering.getsockname()[0] == "::ffff:127.0.0.1", "it is one of IPv6 for the kernel"
        assert sockets.own_host(answering) == sockets.own_host(calling) == "127.0.0.1"


@pytest.mark.parametrize(("bound", "called"), HERE)
def test_what_a_listener_says_of_itself_can_be_dialled(bound: str, called: str) -> None:
    with sockets.listen(bound, 0) as listener:
        host, port = parse_address(sockets.own_address(listener))
        assert port == listener.getsockname()[1]
        sockets.dial(host, port, 5).close()


@needs_ipv6
def test_an_address_with_a_zone() -> None:
    """Of some interface here, if one has any."""
    found = [(host, interface) for interface in socket.if_nameindex() for host in _link_local(interface[1])]
    if not found:
        pytest.skip("NOT TESTED: no interface here has a link-local address")
    host, (_, name) = found[0]
    with both(f"{host}%{name}", f"{host}%{name}") as (listener, calling, answering):
        for each in (listener, calling, answering):
            assert sockets.own_host(each) == f"{host}%{name}"
        assert parse_address(sockets.own_address(listener))[0] == f"{host}%{name}"


def _link_local(name: str) -> Iterator[str]:
    for line in Path("/proc/net/if_inet6").read_text().splitlines():
        digits, _, _, _, _, interface = line.split()
        if interface == name and digits.startswith("fe80"):
            yield socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_a_port_is_one_listeners_unless_all_share_it(host: str) -> None:
    with sockets.listen(host, 0) as alone, pytest.raises(OSError, match="in use"):
        sockets.listen(host, alone.getsockname()[1])
    with sockets.listen(host, 0, reuse_port=True) as one:
        sockets.listen(host, one.getsockname()[1], reuse_port=True).close()


def test_a_name_that_nobody_has() -> None:
    with pytest.raises(OSError, match=r"not known|No address|resolution"):
        sockets.listen("nobody.invalid", 0)
