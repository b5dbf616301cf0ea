"""The containers of the rendered chart as local processes: their commands, environment, ports and probes.

What is real: everything that the chart says, every process, drains, and discovery by EndpointSlices, which
are made of the rendered Services. What is not: the API server is the tests' own, and a kubeconfig stands in
for the service account.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.v1 import inference_pb2, inference_pb2_grpc
from tests.support.chart import of_kind
from tests.support.ipv6 import needs_ipv6
from tests.support.kubelet import Cluster, Pod, until
from tests.support.release import Release, own_ports

TOKENS = 150


@asynccontextmanager
async def installed(folder: Path, example: str) -> AsyncIterator[Cluster]:
    """An example's pods, none of them started."""
    async with released(folder, example).installed() as running:
        yield running


def released(folder: Path, example: str, **router: object) -> Release:
    """A short preStop. ``router``: values of it."""
    plain = {"name": "BATON_CPU_KERNELS", "value": "plain"}  # each pod would build its own
    worker_values = {"preStopSeconds": 1, "drainTimeoutSeconds": 30, "extraEnv": [plain]}
    values = {
        "router": {
            "preStopSeconds": 1,
            "drainTimeoutSeconds": 30,
            "options": {"disaggregation": "always"},
            **router,
        },
        "redis": {"mode": "none"},
        "prefill": worker_values,
        "decode": worker_values,
    }
    return Release(folder, example, values)


def url_of(router: Pod) -> str:
    return f"http://{router.address('http')}"


async def ask(router: Pod, tokens: int = 8) -> dict[str, Any]:
    body = {
        "model": "demo",
        "prompt": "Baton is " * 20,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    async with httpx.AsyncClient(timeout=60) as client:
        answer = await client.post(f"{url_of(router)}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def stream(router: Pod, begun: asyncio.Event, tokens: int) -> int:
    """Tokens of one answer, to its end."""
    body = {
        "model": "demo", "prompt": "Baton is", "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    used = 0
    async with (
        httpx.AsyncClient(timeout=60) as client,
        client.stream("POST", f"{url_of(router)}/v1/completions", json=body) as answer,
    ):
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            begun.set()
            used = (event.get("usage") or {}).get("completion_tokens", used)
    return used


async def call(router: Pod, begun: asyncio.Event, tokens: int) -> int:
    """Likewise over gRPC."""
    params = inference_pb2.SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    request = inference_pb2.GenerateRequest(model="demo", text="Baton is", params=params)
    used = 0
    async with grpc.aio.insecure_channel(router.address("grpc")) as channel:
        async for response in inference_pb2_grpc.InferenceStub(channel).Generate(request):
            begun.set()
            used += len(response.token_ids)
    return used


async def watch_health(router: Pod) -> list[int]:
    """What a client that looks after its channels is told, until the router lets it go."""
    async with grpc.aio.insecure_channel(router.address("grpc")) as channel:
        watched = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        return [answer.status async for answer in watched]


async def drains(router: Pod) -> dict[str, int]:
    """What new connections are answered, once it drains."""
    paths = ("/metrics", "/version", "/health", "/v1/models")
    async with asyncio.timeout(60):
        while True:
            async with httpx.AsyncClient(base_url=url_of(router)) as client:
                found = {path: (await client.get(path)).status_code for path in paths}
            if found["/health"] == found["/v1/models"] == 503:
                return found


async def streams(router: Pod, count: int, tokens: int = TOKENS) -> list[asyncio.Task[int]]:
    """Answers that have begun, every other one over gRPC."""
    begun = [asyncio.Event() for _ in range(count)]
    tasks = [
        asyncio.create_task((call if n % 2 else stream)(router, each, tokens)) for n, each in enumerate(begun)
    ]
    await asyncio.gather(*(each.wait() for each in begun))
    return tasks


async def all_ready(ring: Cluster, router: Pod) -> None:
    """Pods by their probes, and the router's streams to all workers."""
    await until(lambda: all(pod.ready for pod in ring.pods), "all pods ready", ring.pods, 120)
    async with asyncio.timeout(60):
        while await metric(router, "baton_worker_ready", "http") < len(ring.pods) - 1:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def metric(pod: Pod, name: str, port: str = "metrics") -> float:
    async with httpx.AsyncClient() as client:
        page = (await client.get(f"http://{pod.address(port)}/metrics")).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(name + "{"))


async def handoffs_of(prefill: Pod, least: int) -> float:
    """The handoffs that a pod has completed, once there are so many: a client may have its answer before
    prefill hears that its blocks are released."""
    completed = 0.0
    async with asyncio.timeout(120):
        while completed < least:
            await asyncio.sleep(0.05)
            completed = await metric(prefill, "baton_handoffs_completed_total")
    return completed


def passed_in_order(pod: Pod) -> bool:
    """It was not asked whether it is ready or alive before it had started; and it never seemed dead."""
    started = pod.events.index("startup passed")
    early = [event for event in pod.events[:started] if not event.startswith("startup")]
    return not early and "readiness passed" in pod.events and "liveness failed" not in pod.events


async def helm_test_passes(ring: Cluster) -> None:
    """All pods of ``helm test``, as rendered."""
    tests = of_kind(ring.objects, "Pod")
    assert set(tests) == {"test-baton-test", "test-baton-doctor-prefill", "test-baton-doctor-decode"}
    for name in tests:
        pod = await ring.run(name)
        told = pod.log.read_text()
        assert pod.process.returncode == 0, f"{name}: {told}"
        if "doctor" in name:
            assert re.search(r"ok +cluster key", told), told
            assert re.search(r"ok +router +http://\S+ answers", told), told


async def test_pods_start_answer_and_drain(tmp_path: Path) -> None:
    async with installed(tmp_path, "simulated") as ring:
        router = await ring.start("test-baton-router")
        await until(lambda: "readiness failed" in router.events, "a router without workers", ring.pods)
        assert not router.ready, "nobody could answer yet"
        prefill = await ring.start("test-baton-prefill")
        decode, leaving = [await ring.start("test-baton-decode") for _ in range(2)]
        await all_ready(ring, router)
        assert all(passed_in_order(pod) for pod in ring.pods), [pod.events for pod in ring.pods]

        answer = await ask(router)
        assert answer["usage"]["completion_tokens"] == 8
        assert await handoffs_of(prefill, 1) == 1

        # A decode worker leaves: its answers go on elsewhere.
        answers = await streams(router, 4)
        took = await leaving.delete()
        assert leaving.process.returncode == 0, leaving.log.read_text()[-2000:]
        assert leaving.events[-2:] == ["terminating", "preStop over"]
        assert took < 30
        assert [await each for each in answers] == [TOKENS] * 4

        # A prefill worker leaves, and prompts are computed where they are answered.
        await prefill.delete()
        assert prefill.process.returncode == 0, prefill.log.read_text()[-2000:]
        assert (await ask(router))["usage"]["completion_tokens"] == 8

        # The router leaves: as ever during preStop, then nothing new, and what is under way ends.
        answers = await streams(router, 2, 2 * TOKENS)
        watching = asyncio.create_task(watch_health(router))
        deleting = asyncio.create_task(router.delete())
        await asyncio.sleep(0.2)
        await ask(router, 1)
        await until(lambda: router.events[-1] == "preStop over", "SIGTERM", ring.pods)
        statuses = await drains(router)
        assert not any(answer.done() for answer in answers), "it still has something to end"
        assert statuses == {"/metrics": 200, "/version": 200, "/health": 503, "/v1/models": 503}
        assert await deleting < 25, "nobody who watches its health keeps it"
        assert router.process.returncode == 0
        assert (await watching)[-1] == health_pb2.HealthCheckResponse.NOT_SERVING
        assert [await each for each in answers] == [2 * TOKENS] * 2
        assert decode.ready


async def keep_asking(routers: Callable[[], list[Pod]], answers: list[int]) -> None:
    """One question after the other, to a router that is ready. AssertionError where one fails."""
    while True:
        answers.append((await ask(random.choice(routers())))["usage"]["completion_tokens"])


@pytest.mark.deep
async def test_a_cluster_key_is_replaced_under_load(tmp_path: Path) -> None:
    """Pods of both keys serve together, in all pairs, while one generation follows the other."""
    release = released(tmp_path, "simulated")
    key = base64.b64encode(b"the key that comes after").decode()
    metadata = {"name": "ring-cluster-key"}
    theirs = {"kind": "Secret", "metadata": metadata, "data": {"cluster-key": key}}
    values = {"existingSecret": "ring-cluster-key", "previousSecret": "test-baton-cluster-key"}
    newer = of_kind(release.objects({"clusterKey": values}), "Deployment")
    names = [f"test-baton-{component}" for component in ("router", "prefill", "decode")]
    async with release.installed() as ring:
        ring.objects = [*ring.objects, theirs]
        old = [await ring.start(name) for name in names]
        await all_ready(ring, old[0])
        answers: list[int] = []

        def routers() -> list[Pod]:
            return [pod for pod in ring.pods if pod.name.startswith(names[0]) and pod.ready]

        asking = [asyncio.create_task(keep_asking(routers, answers)) for _ in range(4)]
        new = [await ring.start(name, newer[name]["spec"]["template"]) for name in names]
        await until(lambda: all(pod.ready for pod in new), "the new pods ready", ring.pods, 120)
        for router in (old[0], new[0]):  # each has all workers
            async with asyncio.timeout(30):
                while await metric(router, "baton_worker_ready", "http") < 4:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        both = len(answers)
        await until(lambda: len(answers) > both + 20, "answers of both", ring.pods)
        for pod in reversed(old):
            await pod.delete()
        after = len(answers)
        await until(lambda: len(answers) > after + 20, "answers of the new ones", ring.pods)
        for task in asking:
            task.cancel()
        for ended in await asyncio.gather(*asking, return_exceptions=True):
            assert isinstance(ended, asyncio.CancelledError), ended
        assert set(answers) == {8}
        for pod in ring.pods:
            assert "another cluster key" not in pod.log.read_text()


@needs_ipv6
async def test_pods_of_a_cluster_that_has_only_ipv6(tmp_path: Path) -> None:
    """What the chart says with the value for such a cluster. Workers listen on the address of their pod."""
    release = released(tmp_path, "simulated", host="::")
    async with release.installed(ip_of=lambda number: "::1") as ring:
        router = await ring.start("test-baton-router")
        prefill, decode = [
            await ring.start(name, own_ports(release, name))
            for name in ("test-baton-prefill", "test-baton-decode")
        ]
        await all_ready(ring, router)
        assert all(passed_in_order(pod) for pod in ring.pods), [pod.events for pod in ring.pods]
        assert (await ask(router))["usage"]["completion_tokens"] == 8
        assert await call(router, asyncio.Event(), 8) == 8
        assert await handoffs_of(prefill, 1) >= 1
        for pod in (prefill, decode):
            assert f"ready at {pod.address('grpc')}" in pod.log.read_text()
        await asyncio.gather(prefill.delete(), decode.delete())
        assert [pod.process.returncode for pod in (prefill, decode)] == [0, 0]


@pytest.mark.deep
async def test_pods_with_a_model_answer(tmp_path: Path) -> None:
    async with installed(tmp_path, "cpu-trial") as ring:
        for name in ("prefill", "decode", "router"):
            await ring.start(f"test-baton-{name}")
        prefill, decode, router = ring.pods
        await all_ready(ring, router)
        assert all(passed_in_order(pod) for pod in ring.pods), [pod.events for pod in ring.pods]
        answer = await ask(router)
        assert answer["usage"]["completion_tokens"] == 8
        assert await handoffs_of(prefill, 1) == 1
        await helm_test_passes(ring)
        await asyncio.gather(prefill.delete(), decode.delete())
        assert [pod.process.returncode for pod in (prefill, decode)] == [0, 0]
