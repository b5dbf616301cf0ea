"""RDMA: a worker that is to have it has it or does not start, and says why."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.process.options import StartError
from baton.transport import network_interface, registry, torch_group
from baton.transport.base import ConnectorMissingError, ConnectorSettings
from baton.transport.pool_memory import PoolMemory
from baton.transport.staging import Staging
from baton.transport.torch_group import GroupConnector
from baton.worker.kv_endpoints import make_ends

NOWHERE = "no connector here has RDMA"


def settings() -> ConnectorSettings:
    return ConnectorSettings(Staging(), lambda: None, "127.0.0.1", require_rdma=True)


class Capable:
    """A connector that lacks this."""

    drained_is_proof = False

    def __init__(self, name: str, missing: str) -> None:
        self.name = name
        self.missing_for_rdma = missing


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def make(**missing: str) -> None:
        """Only these connectors are there."""
        monkeypatch.setattr(registry, "_all_made", lambda _: {n: Capable(n, m) for n, m in missing.items()})

    return make


class TestRequired:
    def test_every_connector_says_what_it_lacks(self) -> None:
        with pytest.raises(ConnectorMissingError, match=f"--require-rdma: {NOWHERE}.*tcp: it never has"):
            registry.available("auto", settings())
        with pytest.raises(ConnectorMissingError, match=rf"{NOWHERE} \(tcp: it never has\)"):
            registry.available("tcp", settings())

    async def test_ucx_without_verbs_names_the_transports_that_it_has(self) -> None:
        pytest.importorskip("ucxx")
        with pytest.raises(ConnectorMissingError, match=r"UCX has no verbs transport here, only .*tcp"):
            registry.available("ucx", settings())

    def test_nothing_is_demanded_that_was_not_asked_for(self) -> None:
        assert list(registry.available("tcp", replace(settings(), require_rdma=False))) == ["tcp"]

    def test_only_those_that_have_it_are_offered(
        self, made: Callable[..., None], caplog: pytest.LogCaptureFixture
    ) -> None:
        made(a="", b="no device", c="")
        with caplog.at_level(logging.INFO):
            assert list(registry.available("auto", settings())) == ["a", "c"]
        assert "without RDMA, and not offered: b: no device" in caplog.text

    async def test_a_worker_does_not_start_without(self) -> None:
        memory = PoolMemory(torch.zeros(2, 1, 1, 2, 4, 4))
        with pytest.raises(StartError, match=NOWHERE):
            await make_ends(memory, None, "tcp", "127.0.0.1", (), lambda: None, require_rdma=True)
        ends = await make_ends(memory, None, "tcp", "127.0.0.1", (), lambda: None)
        assert ends.connectors == ("tcp",)
        await ends.close()


class TestNccl:
    """NCCL brings verbs of its own, and looks for devices and for their library."""

    @pytest.fixture(autouse=True)
    def devices(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(network_interface, "_INFINIBAND", tmp_path)
        return tmp_path

    def test_what_it_takes(self, devices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        nccl = GroupConnector("nccl", Staging(), lambda: None, 0)
        assert nccl.missing_for_rdma == "this host shows no RDMA device"
        (devices / "mlx5_0" / "ports" / "1").mkdir(parents=True)
        monkeypatch.setattr(torch_group, "_VERBS", "libsurelynot.so.1")
        assert nccl.missing_for_rdma == "NCCL finds no libsurelynot.so.1"
        monkeypatch.setattr(torch_group, "_VERBS", "libc.so.6")
        assert nccl.missing_for_rdma == ""
        assert GroupConnector("gloo", Staging(), lambda: None).missing_for_rdma == "gloo never has"
