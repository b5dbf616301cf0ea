"""Rendered pods as local processes: what a kubelet does with command, env, volumes, probes and drain.

Each pod has a loopback address of its own (127.0.0.0/8), so that ports are those of the manifest; of IPv6
there is only ``::1``, which pods share, so that each needs ports of its own. Probes are asked as the manifest
says, only more often. What containers isolate is not imitated: users, file systems,
resources.
"""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.process.options import is_ipv6, join_address
from tests.support.chart import Object, of_kind, selects
from tests.support.fake_kubernetes import FakeKubernetes, Slice

INIT = ["tini", "--"]
"""What passes signals on in a container (tests/e2e/test_starts_stop.py). Processes here need none."""
HURRY = 10.0
"""Probes are asked so many times as often, if nothing else is said."""
SLICES_LAG_S = 0.7
"""Until a change of a pod is in the EndpointSlices, as seen with a real control plane (1.36)."""


@dataclass
class Pod:
    """One pod of a Deployment's template, with its one container."""

    name: str
    template: Object
    ip: str
    folder: Path
    secrets: Mapping[str, Object]
    on_change: Callable[[], None]
    hurry: float = HURRY
    services: Mapping[str, str] = field(default_factory=dict)
    """host:port of Services → host:port of a pod, as cluster DNS and kube-proxy have it."""
    events: list[str] = field(default_factory=list)
    """What became of its probes, in order, each change once."""
    ready: bool = False
    terminating: bool = False
    process: asyncio.subprocess.Process = field(init=False)
    _probing: asyncio.Task[None] = field(init=False)

    @property
    def spec(self) -> Object:
        found: Object = self.template["spec"]
        return found

    @property
    def container(self) -> Object:
        found: Object = self.spec["containers"][0]
        return found

    @property
    def labels(self) -> dict[str, str]:
        found: dict[str, str] = self.template["metadata"]["labels"]
        return found

    @property
    def started(self) -> bool:
        return hasattr(self, "process")

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def port(self, name: str | int) -> int:
        named = {each["name"]: each["containerPort"] for each in self.container["ports"]}
        return name if isinstance(name, int) else int(named[name])

    def address(self, port: str | int) -> str:
        """host:port"""
        return join_address(self.ip, self.port(port))

    async def start(self) -> None:
        await self._spawn()
        self._probing = asyncio.create_task(self._probe())

    async def run(self) -> int:
        """A pod without probes, to its end. Returns the exit status."""
        await self._spawn()
        return await self.process.wait()

    async def _spawn(self) -> None:
        self.folder.mkdir(parents=True)
        assert self.container["command"] == [*INIT, "baton"], self.container["command"]
        arguments = [self._expanded(argument) for argument in self.container["args"]]
        with self.log.open("wb") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "baton", *arguments,
                stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment(),
            )  # fmt: skip

    async def delete(self) -> float:
        """preStop, SIGTERM, and SIGKILL when the grace is over, which ``events`` tell. Returns the seconds
        that it took."""
        began, grace = time.monotonic(), self.spec["terminationGracePeriodSeconds"]
        self.terminating, self.ready = True, False  # its endpoint says so at once
        self.on_change()
        self._probing.cancel()  # of a pod that ends no liveness is asked
        self.events.append("terminating")
        try:
            async with asyncio.timeout(grace):
                await self._end_in_order()
        except TimeoutError:
            self.events.append("killed")
            await self.kill()
        self.on_change()
        return time.monotonic() - began

    async def _end_in_order(self) -> None:
        hook = self.container.get("lifecycle", {}).get("preStop")
        if hook is not None:
            await (await asyncio.create_subprocess_exec(*hook["exec"]["command"])).wait()
            self.events.append("preStop over")
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        await self.process.wait()

    async def kill(self) -> None:
        if hasattr(self, "_probing"):
            self._probing.cancel()
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()

    # --- environment and volumes

    def _environment(self) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
        given = {each["name"]: self._value(each) for each in self.container.get("env", [])}
        return {**kept, **{name: self._local(value) for name, value in given.items() if value is not None}}

    def _value(self, variable: Object) -> str | None:
        """None: the key of a Secret that is not there, and need not be."""
        source = variable.get("valueFrom")
        if source is None:
            return str(variable["value"])
        if "fieldRef" in source:
            known = {"status.podIP": self.ip, "metadata.name": self.name, "metadata.namespace": "serving"}
            return known[source["fieldRef"]["fieldPath"]]
        reference = source["secretKeyRef"]
        data = self.secrets.get(reference["name"], {}).get("data", {})
        if reference.get("optional") and reference["key"] not in data:
            return None
        return base64.b64decode(self.secrets[reference["name"]]["data"][reference["key"]]).decode()

    def _expanded(self, argument: str) -> str:
        for variable in self.container.get("env", []):
            if f"$({variable['name']})" in argument:
                argument = argument.replace(f"$({variable['name']})", self._value(variable) or "")
        return self._local(argument)

    def _local(self, text: str) -> str:
        """A path inside a volume is one of this pod's folder, unless there is such a place here as well; a
        Service is one of its pods."""
        for service, address in self.services.items():
            text = text.replace(f"//{service}", f"//{address}")
        for mount in self.container.get("volumeMounts", []):
            if Path(mount["mountPath"]).exists():
                continue
            if text == mount["mountPath"] or text.startswith(mount["mountPath"] + "/"):
                place = self.folder / mount["name"]
                place.mkdir(exist_ok=True)
                return str(place) + text.removeprefix(mount["mountPath"])
        return text

    # --- probes

    async def _probe(self) -> None:
        startup = self.container["startupProbe"]
        for _ in range(startup["failureThreshold"] * round(self.hurry)):
            if await self._asked("startup", startup):
                break
            if self.process.returncode is not None:
                self.events.append(f"ended with {self.process.returncode}")
                return
            await asyncio.sleep(startup["periodSeconds"] / self.hurry)
        else:
            self.events.append("startup budget exceeded")
            return
        liveness = asyncio.create_task(self._stay_alive())
        try:
            await self._stay_ready()
        finally:
            liveness.cancel()

    async def _stay_ready(self) -> None:
        probe = self.container["readinessProbe"]
        failed = 0
        while True:
            failed = 0 if await self._asked("readiness", probe) else failed + 1
            ready = failed == 0 or (self.ready and failed < probe["failureThreshold"])
            if ready != self.ready:
                self.ready = ready
                self.on_change()
            await asyncio.sleep(probe["periodSeconds"] / self.hurry)

    async def _stay_alive(self) -> None:
        probe = self.container["livenessProbe"]
        while True:
            await self._asked("liveness", probe)
            await asyncio.sleep(probe["periodSeconds"] / self.hurry)

    async def _asked(self, name: str, probe: Object) -> bool:
        try:
            async with asyncio.timeout(probe["timeoutSeconds"]):
                passed = await self._answers(probe)
        except (OSError, TimeoutError, httpx.HTTPError, grpc.aio.AioRpcError):
            passed = False
        event = f"{name} {'passed' if passed else 'failed'}"
        if [each for each in self.events if each.startswith(name)][-1:] != [event]:
            self.events.append(event)
        return passed

    async def _answers(self, probe: Object) -> bool:
        if "httpGet" in probe:
            get = probe["httpGet"]
            url = f"{get['scheme'].lower()}://{self.address(get['port'])}{get['path']}"
            async with httpx.AsyncClient(verify=False) as client:
                return 200 <= (await client.get(url)).status_code < 400
        if "grpc" in probe:
            asked = probe["grpc"]
            async with grpc.aio.insecure_channel(self.address(asked["port"])) as channel:
                request = health_pb2.HealthCheckRequest(service=asked["service"])
                answer = await health_pb2_grpc.HealthStub(channel).Check(request)
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
        _, writer = await asyncio.open_connection(self.ip, self.port(probe["tcpSocket"]["port"]))
        writer.close()
        return True


class Cluster:
    """Pods, and the EndpointSlices that Services make of them."""

    def __init__(
        self,
        objects: Sequence[Object],
        api: FakeKubernetes,
        folder: Path,
        hurry: float = HURRY,
        lag_s: Callable[[], float] = lambda: SLICES_LAG_S,
        ip_of: Callable[[int], str] = lambda number: f"127.0.1.{10 + number}",
    ) -> None:
        """``lag_s``: seconds until the next change of a pod is in the slices. ``ip_of``: the address of each,
        by its number."""
        self.objects = objects
        self.pods: list[Pod] = []
        self._api = api
        self._folder = folder
        self._hurry = hurry
        self._lag_s = lag_s
        self._ip_of = ip_of

    async def start(self, deployment: str, template: Object | None = None) -> Pod:
        """One more pod of it. ``template``: another than that of ``objects``."""
        number = len(self.pods)
        pod = Pod(
            f"{deployment}-{number}",
            template or of_kind(self.objects, "Deployment")[deployment]["spec"]["template"],
            self._ip_of(number),
            self._folder / f"{deployment}-{number}",
            of_kind(self.objects, "Secret"),
            self._changed,
            self._hurry,
        )
        self.pods.append(pod)
        await pod.start()
        self._changed()
        return pod

    async def run(self, name: str) -> Pod:
        """One of the release's Pods, such as a hook of ``helm test``, to its end. It must not listen: its
        address is one that pods have, and not this machine's."""
        pod = Pod(
            name,
            of_kind(self.objects, "Pod")[name],
            "10.244.0.24",
            self._folder / name,
            of_kind(self.objects, "Secret"),
            lambda: None,
            services=dict(self._services()),
        )
        await pod.run()
        return pod

    def _services(self) -> Iterator[tuple[str, str]]:
        """Each port of a Service, and a ready pod behind it."""
        for name, service in of_kind(self.objects, "Service").items():
            for pod in self.pods:
                if pod.ready and selects({"matchLabels": service["spec"]["selector"]}, pod.labels):
                    for port in service["spec"]["ports"]:
                        yield f"{name}:{port['port']}", pod.address(port["targetPort"])

    def _changed(self) -> None:
        lag_s = self._lag_s()
        if lag_s:
            asyncio.get_running_loop().call_later(lag_s, self._publish)
        else:
            self._publish()

    def _publish(self) -> None:
        """As the EndpointSlice controller does; a selector sees what has its labels."""
        for name, service in of_kind(self.objects, "Service").items():
            labels = service["metadata"]["labels"]
            if not matches(self._api.selector, labels):
                continue
            chosen = [
                pod for pod in self.pods if selects({"matchLabels": service["spec"]["selector"]}, pod.labels)
            ]
            alive = [pod for pod in chosen if pod.started and pod.process.returncode is None]
            ports = [
                {"name": port["name"], "port": pod.port(port["targetPort"])}
                for pod in chosen[:1]
                for port in service["spec"]["ports"]
            ]
            family = "IPv6" if any(is_ipv6(pod.ip) for pod in alive) else "IPv4"
            endpoints = [_endpoint(pod) for pod in alive]
            self._api.put(name, endpoints, labels=labels, ports=ports, addressType=family)


def _endpoint(pod: Pod) -> Slice:
    conditions = {"ready": pod.ready, "serving": pod.ready or pod.terminating, "terminating": pod.terminating}
    target = {"kind": "Pod", "uid": pod.name}
    return {"addresses": [pod.ip], "conditions": conditions, "targetRef": target, "zone": "a"}


def matches(selector: str, labels: Mapping[str, str]) -> bool:
    """A selector of keys, and of keys with values."""
    parts = (part.partition("=") for part in selector.split(","))
    return all(key in labels and (not equals or labels[key] == value) for key, equals, value in parts)


@asynccontextmanager
async def cluster(
    objects: Sequence[Object],
    api: FakeKubernetes,
    folder: Path,
    hurry: float = HURRY,
    lag_s: Callable[[], float] = lambda: SLICES_LAG_S,
    ip_of: Callable[[int], str] | None = None,
) -> AsyncIterator[Cluster]:
    """Whatever still runs at the end is killed."""
    of_their_own = {} if ip_of is None else {"ip_of": ip_of}
    running = Cluster(objects, api, folder, hurry, lag_s, **of_their_own)
    try:
        yield running
    finally:
        for pod in running.pods:
            if pod.started:
                await pod.kill()


async def until(condition: Callable[[], Any], what: str, pods: Sequence[Pod], seconds: float = 60.0) -> None:
    """AssertionError with the events and logs of the pods when it does not come true."""
    try:
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    except TimeoutError:
        told = "\n".join(f"{pod.name}: {pod.events}\n{pod.log.read_text()[-2000:]}" for pod in pods)
        raise AssertionError(f"not within {seconds} s: {what}\n{told}") from None
