"""A release of the chart whose pods are local processes, before an API server of the tests' own."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.support.chart import CHART, Object, of_kind, render
from tests.support.fake_kubernetes import FakeKubernetes, serving
from tests.support.kubelet import HURRY, SLICES_LAG_S, Cluster, cluster

ROUTER = "test-baton-router"


class Release:
    """What is rendered of an example, with ports that are free here and credentials of another kind."""

    def __init__(self, folder: Path, example: str, values: Mapping[str, Any]) -> None:
        """``values``: in front of the example's."""
        self._folder = folder
        self._example = CHART / f"examples/{example}.yaml"
        self._kubeconfig = folder / "kubeconfig"
        http, grpc, worker, metrics = free_ports(4)
        workers = {"ports": {"grpc": worker, "metrics": metrics}}
        router = {
            "host": "$(POD_IP)",  # others of its ports are on this machine
            "ports": {"http": http, "grpc": grpc},
            "extraArgs": ["--kubeconfig", str(self._kubeconfig)],
        }
        self._values = merged({"router": router, "workers": workers}, values)

    def objects(self, values: Mapping[str, Any] | None = None) -> list[Object]:
        """As ``helm upgrade`` with further values would apply them."""
        return render(merged(self._values, values or {}), files=[self._example])

    @asynccontextmanager
    async def installed(
        self, hurry: float = HURRY, lag_s: Callable[[], float] = lambda: SLICES_LAG_S
    ) -> AsyncIterator[Cluster]:
        """Its pods, none of them started, before an API server that knows the selector that is rendered."""
        objects = self.objects()
        router = of_kind(objects, "Deployment")[ROUTER]["spec"]["template"]["spec"]["containers"][0]
        selector = router["args"][router["args"].index("--kubernetes-selector") + 1]
        async with serving(FakeKubernetes(selector=selector)) as api:
            self._kubeconfig.write_text(yaml.safe_dump(kubeconfig(api.url)))
            async with cluster(objects, api, self._folder, hurry, lag_s) as running:
                yield running


def merged(values: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """As helm does with two files of values."""
    both = values.keys() & over.keys()
    deep = {
        key: merged(values[key], over[key]) if isinstance(over[key], Mapping) else over[key] for key in both
    }
    return {**values, **over, **deep}


def free_ports(count: int) -> Sequence[int]:
    sockets = [socket.create_server(("0.0.0.0", 0)) for _ in range(count)]
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


def kubeconfig(url: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": {"server": url}}],
        "users": [{"name": "test", "user": {"token": "test"}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "current-context": "test",
    }
