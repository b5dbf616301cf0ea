"""Which interface has an address, and what UCX is told of it."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from baton.transport.network_interface import interface_of
from tests.support.ipv6 import needs_ipv6

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the Linux kernel")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_loopback(host: str) -> None:
    assert interface_of(host) == "lo"


@needs_ipv6
def test_the_loopback_of_ipv6() -> None:
    assert interface_of("::1") == "lo"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.200"])
def test_a_wildcard_or_an_address_of_others_is_no_interface(host: str) -> None:
    assert interface_of(host) is None


@pytest.mark.skipif(
    importlib.util.find_spec("ucxx") is None,
    reason="NOT TESTED: ucxx is not installed (pip install 'baton[ucx]')",
)
class TestUcx:
    def test_a_specific_host_restricts_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from baton.transport.ucx_driver import interface_options

        monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
        assert interface_options("127.0.0.1") == {"NET_DEVICES": "lo"}
        assert interface_options("0.0.0.0") == {}

    @needs_ipv6
    def test_a_host_of_ipv6_is_called_by_ipv6(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from baton.transport.ucx_driver import interface_options

        monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
        monkeypatch.delenv("UCX_TCP_AF_PRIO", raising=False)
        assert interface_options("::1") == {"NET_DEVICES": "lo", "TCP_AF_PRIO": "inet6,inet"}
        assert interface_options("::") == {}
        monkeypatch.setenv("UCX_TCP_AF_PRIO", "inet")
        assert interface_options("::1") == {"NET_DEVICES": "lo"}

    def test_the_users_own_choice_goes_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from baton.transport.ucx_driver import interface_options

        monkeypatch.setenv("UCX_NET_DEVICES", "eth7")
        assert interface_options("127.0.0.1") == {}
