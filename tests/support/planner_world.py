"""Around a planner: a Prometheus that says what it is told to, an API server with two scales, workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import grpc
from aiohttp import web
from kubernetes.aio.client import Configuration
from kubernetes.aio.config import ConfigException
from prometheus_client import CollectorRegistry

from baton.greeting.cluster_key import ClusterKeys
from baton.handoff.identity import sign_switch
from baton.net.channels import Dialer
from baton.planner.measured import ServingRole
from baton.planner.policy import Planner
from baton.planner.prometheus import Prometheus
from baton.planner.queries import Queries
from baton.planner.scales import Scales
from baton.planner.service import PlannerService
from baton.planner.workers import Workers
from baton.router.discovery.endpoint import Endpoint, Tell
from baton.telemetry.planner import PlannerMetrics
from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc as pb_grpc
from tests.support.greetings import say_hello
from tests.support.planning import BOUNDS, TARGETS, TIMES

KEY = b"tests"
NAMESPACE = "serving"
QUERIES = Queries(f'namespace="{NAMESPACE}"')
ROLE_OF = {"prefill": pb.ROLE_PREFILL, "decode": pb.ROLE_DECODE}


class FakePrometheus:
    """Numbers by the names of `Queries`, and workers as routers know them."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {
            "requests": 20.0,
            "prompts": 20_000.0,
            "cached": 0.0,
            "at_prefill": 1.0,
            "answer_tokens": 200.0,
            "tokens_per_s": 5000.0,
            "waiting_tokens": 0.0,
            "waiting_outside": 0.0,
            "prepare": 0.001,
            "step_base": 0.02,
            "step_row": 0.0002,
            "blocks": 7500.0,
            "held": 3000.0,
            "running": 40.0,
            "waiting": 0.0,
            "homeless": 0.0,
            "step": 0.024,
            "rows": 20.0,
            "told_prefill": 9.0,
            "told_decode": 9.0,
            "age_of_workers": 5.0,
            "age_of_routers": 5.0,
        }
        self.roles: dict[str, str] = {}
        self.body: bytes | None = None
        """To be answered whatever is asked."""
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        if self.body is not None:
            return web.Response(body=self.body)
        expression = str((await request.post())["query"])
        named = {asked: name for name, asked in QUERIES.all().items()}
        found: list[tuple[dict[str, str], float]]
        if expression in named:
            found = [({}, self.values[named[expression]])] if named[expression] in self.values else []
        elif "baton_worker_ready" in expression:
            found = [({"worker": each, "role": role}, 1.0) for each, role in self.roles.items()]
        elif "_bucket" in expression:
            found = [({"le": "256"}, 10.0), ({"le": "1024"}, 90.0), ({"le": "+Inf"}, 100.0)]
        else:
            found = []
        result = [{"metric": labels, "value": [0, str(number)]} for labels, number in found]
        return web.json_response({"status": "success", "data": {"resultType": "vector", "result": result}})


class FakeScales:
    """The scale subresource of ``baton-prefill`` and ``baton-decode``."""

    def __init__(self, prefill: int, decode: int) -> None:
        self.replicas = {"baton-prefill": prefill, "baton-decode": decode}
        self.versions = dict.fromkeys(self.replicas, 1)
        self.written: list[tuple[str, int]] = []
        self.meddle = False
        """Somebody else changes what is read before it is written."""
        self.unauthorized = False
        """Credentials have run out, and there are no new ones."""
        self.url = ""

    async def get(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if self.unauthorized:
            return web.json_response({"code": 401}, status=401)
        answer = self._scale(name)
        if self.meddle:
            self.versions[name] += 1
        return answer

    async def patch(self, request: web.Request) -> web.Response:
        name, body = request.match_info["name"], json.loads(await request.read())
        assert request.content_type == "application/merge-patch+json"
        if body["metadata"]["resourceVersion"] != str(self.versions[name]):
            return web.json_response({"code": 409}, status=409)
        self.replicas[name] = body["spec"]["replicas"]
        self.versions[name] += 1
        self.written.append((name, self.replicas[name]))
        return self._scale(name)

    def _scale(self, name: str) -> web.Response:
        return web.json_response(
            {
                "kind": "Scale",
                "metadata": {"name": name, "resourceVersion": str(self.versions[name])},
                "spec": {"replicas": self.replicas[name]},
                "status": {"replicas": self.replicas[name]},
            }
        )

    async def connect(self) -> Configuration:
        if self.unauthorized:
            raise ConfigException("Service token file does not exist.")
        return Configuration(host=self.url)


class SwitchingWorker(pb_grpc.WorkerServicer):
    """Greets, and switches to what a proof allows."""

    def __init__(self, role: str) -> None:
        self.role, self.incarnation = role, f"first-{role}"
        self.refuses = False
        self.address = ""

    async def Connect(  # noqa: N802 (the name is the contract's)
        self,
        request_iterator: AsyncIterator[pb.RouterMessage],
        context: grpc.aio.ServicerContext[pb.RouterMessage, pb.WorkerMessage],
    ) -> AsyncIterator[pb.WorkerMessage]:
        hello = pb.WorkerHello(incarnation=self.incarnation, role=ROLE_OF[self.role])
        async for answer in say_hello(aiter(request_iterator), KEY, hello):
            yield answer

    async def SwitchRole(  # noqa: N802
        self,
        request: pb.SwitchRoleRequest,
        context: grpc.aio.ServicerContext[pb.SwitchRoleRequest, pb.SwitchRoleReply],
    ) -> pb.SwitchRoleReply:
        wanted: ServingRole = "prefill" if request.role == pb.ROLE_PREFILL else "decode"
        assert request.proof == sign_switch(KEY, self.incarnation, wanted)
        if self.refuses:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "something could not be ended")
        was, self.role = self.role, wanted
        return pb.SwitchRoleReply(was=ROLE_OF[was], now=ROLE_OF[wanted], seconds=0.5)


@dataclass(slots=True)
class KnownWorkers:
    """Discovery that has been told."""

    known: Sequence[Endpoint] = ()
    staleness_s: float = 0.0

    async def run(self, tell: Tell) -> None:
        await asyncio.Event().wait()


@dataclass(slots=True)
class World:
    service: PlannerService
    prometheus: FakePrometheus
    scales: FakeScales
    discovery: KnownWorkers
    workers: list[SwitchingWorker]
    registry: CollectorRegistry
    sites: list[web.AppRunner] = field(default_factory=list)

    def count(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0


@asynccontextmanager
async def world(
    prefill: int = 2, decode: int = 2, *, dry_run: bool = False, gpu_budget: int = 24
) -> AsyncIterator[World]:
    """A planner before so many workers, as many as their Deployments ask for."""
    async with AsyncExitStack() as stack:
        prometheus, scales = FakePrometheus(), FakeScales(prefill, decode)
        scale = "/apis/apps/v1/namespaces/serving/deployments/{name}/scale"
        prometheus.url, _ = await _serve(stack, web.post("/api/v1/query", prometheus.answer))
        scales.url, runner = await _serve(stack, web.get(scale, scales.get), web.patch(scale, scales.patch))
        roles: list[ServingRole] = [*(["prefill"] * prefill), *(["decode"] * decode)]  # type: ignore[list-item]
        workers = [await _worker(stack, role) for role in roles]
        known = [Endpoint(address=w.address, role=role) for w, role in zip(workers, roles, strict=True)]
        prometheus.roles = {worker.address: worker.role for worker in workers}
        registry, discovery = CollectorRegistry(), KnownWorkers(known)
        bounds = BOUNDS if gpu_budget == BOUNDS.gpu_budget else type(BOUNDS)(gpu_budget=gpu_budget)
        asking = Workers(ClusterKeys(KEY), Dialer())
        stack.push_async_callback(asking.close)
        client = Scales(scales.connect, NAMESPACE, {"prefill": "baton-prefill", "decode": "baton-decode"})
        stack.push_async_callback(client.close)
        service = PlannerService(
            Planner(TARGETS, bounds, TIMES),
            QUERIES,
            await stack.enter_async_context(Prometheus(prometheus.url, timeout_s=2.0)),
            client,
            discovery,
            asking,
            PlannerMetrics(registry),
            bounds,
            stale_s=60.0,
            dry_run=dry_run,
        )
        yield World(service, prometheus, scales, discovery, workers, registry, [runner])


async def _serve(stack: AsyncExitStack, *routes: web.RouteDef) -> tuple[str, web.AppRunner]:
    app = web.Application()
    app.router.add_routes(routes)
    runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return f"http://127.0.0.1:{runner.addresses[0][1]}", runner


async def _worker(stack: AsyncExitStack, role: str) -> SwitchingWorker:
    worker, server = SwitchingWorker(role), grpc.aio.server()
    pb_grpc.add_WorkerServicer_to_server(worker, server)
    worker.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    stack.push_async_callback(server.stop, None)
    return worker
