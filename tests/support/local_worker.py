"""Workers inside the test's own process: the real services and roles over real sockets, on a fake engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from prometheus_client import CollectorRegistry
from torch import Tensor

from baton.core.priority import NO_PRIORITY, Priority
from baton.core.role import Role
from baton.core.role_proto import role_to_proto
from baton.core.sampling_params import ResolvedSampling
from baton.engine.engine import Engine
from baton.greeting.cluster_key import ClusterKeys
from baton.handoff import wire
from baton.handoff.identity import PROTOCOL, compatibility_digest
from baton.handoff.wiring import Wiring
from baton.net.certificates import TlsFiles
from baton.net.channels import Dialer, add_port
from baton.net.heartbeat import TEMPO, Tempo
from baton.roles.decode import DecodeRole
from baton.roles.prefill import PrefillRole
from baton.router.discovery.endpoint import Discovery
from baton.router.dispatch.retries import Retries, RetryPolicy
from baton.router.dispatch.ring import WorkerRing
from baton.router.dispatch.types import Request
from baton.router.placement import PlacementOptions
from baton.telemetry.beats import BeatMetrics
from baton.telemetry.handoff import HandoffMetrics
from baton.telemetry.resumes import ResumeMetrics
from baton.telemetry.stages import StageMetrics
from baton.telemetry.supervision import Supervision
from baton.telemetry.switches import SwitchMetrics
from baton.telemetry.tasks import TaskMetrics
from baton.transport.pool_memory import PoolMemory
from baton.transport.ranks.endpoint import LocalEndpoint, RankAddress
from baton.transport.ranks.endpoints import RankEndpoints
from baton.transport.ranks.shard import whole_shard
from baton.transport.tcp import TcpConnector
from baton.v1 import handoff_pb2, handoff_pb2_grpc, worker_pb2, worker_pb2_grpc
from baton.worker.beats import BeatService
from baton.worker.drain import Drain
from baton.worker.engine_loop import EngineLoop
from baton.worker.kv_groups import groups_of
from baton.worker.main import start_timers
from baton.worker.role_switch import RoleSwitch
from baton.worker.routers import Routers
from baton.worker.server import make_server
from baton.worker.service import WorkerService
from baton.worker.switch_request import RoleIncarnation
from baton_kernels.paged import PagedBatch
from tests.support.fake_engine import VOCAB_SIZE, FakeModel, fake_engine
from tests.support.runners import runner_of

KEY = b"the cluster key of tests"
KEYS = ClusterKeys(KEY)
SPLIT = PlacementOptions("always")
"""What a test of handoffs wants: an idle decode worker would rather compute a prompt itself."""


class SlowModel(FakeModel):
    """Takes its time over every step, so that a test can act while a request runs."""

    def __init__(self, step_s: float) -> None:
        super().__init__(VOCAB_SIZE)
        self.step_s = step_s

    def forward(self, token_ids: Tensor, batch: PagedBatch, pool: Tensor) -> Tensor:
        time.sleep(self.step_s)
        return super().forward(token_ids, batch, pool)


class LocalWorker:
    """One worker. ``revision`` is part of what must be equal for two workers to link; routers hear of it if
    it ``tells_terms``. ``make_engine`` is called with the model. ``port`` 0: any. What it says of
    ``kv_bytes_per_token`` is by default true of the fake engine's pool. ``mortal``: the test wants a step of
    it to fail; with any other worker, that ends the test (``local_ring``)."""

    def __init__(
        self,
        role: Role,
        *,
        step_s: float = 0.0,
        tempo: Tempo = TEMPO,
        revision: str = "1",
        tells_terms: bool = False,
        make_engine: Callable[..., Engine] = fake_engine,
        make_model: Callable[[float], SlowModel] = SlowModel,
        port: int = 0,
        kv_bytes_per_token: int = 96,
        tls: TlsFiles | None = None,
        keys: ClusterKeys = KEYS,
        mortal: bool = False,
    ) -> None:
        self._keys = keys
        self.role = role
        self.port = port
        self._kv_bytes_per_token = kv_bytes_per_token
        self._tls = tls
        self.engine = make_engine(model=make_model(step_s))
        self.routers = Routers()
        self.post = RoleIncarnation.new(role)
        self.crashed = asyncio.Event()
        self.mortal = mortal
        self.on_failed_step: Callable[[], None] = lambda: None
        self._tempo = tempo
        self._revision = revision
        self._tells_terms = tells_terms
        self._stack = AsyncExitStack()
        pool = runner_of(self.engine).pool
        host = self.engine.host
        memory = PoolMemory(pool) if host is None else PoolMemory(pool, host.settle)
        self._layout = memory.layout
        self._share = whole_shard(memory.layout.groups)
        connectors = {"tcp": TcpConnector(memory.staging(), self.crashed.set)}
        self._ends = RankEndpoints([LocalEndpoint(connectors, memory, self._share)])
        self.address = ""

    async def start(self) -> None:
        server = make_server(max_model_len=256)
        self.port = add_port(server, f"127.0.0.1:{self.port}", self._tls)
        self.address = f"127.0.0.1:{self.port}"
        self.registry = CollectorRegistry()
        self.wiring = self._wiring()
        crash = self.crashed.set
        self.prefill = PrefillRole(self.engine, self.wiring, self.routers, crash, self._tempo)
        self.decode = DecodeRole(self.engine, self.wiring, self.routers, crash, crash, self._tempo)
        hello = worker_pb2.WorkerHello(
            incarnation=self.incarnation,
            role=worker_pb2.Role.Value(f"ROLE_{self.role.upper()}"),
            max_model_len=256,
            vocab_size=VOCAB_SIZE,
            handoff_address=self.address,
            block_size=self.engine.pool.block_size,
            num_blocks=self.engine.pool.num_blocks,
            max_running=self.engine.scheduler.limits.max_num_seqs,
            chunk_tokens=self.engine.scheduler.limits.prefill_chunk,
            mixed_prefill_tokens=self.engine.scheduler.limits.max_num_batched_tokens,
            tells_blocks=self.engine.scheduler.limits.prefix_caching,
            kv_bytes_per_token=self._kv_bytes_per_token,
            kv_groups=groups_of(self.engine.scheduler.layout),
        )
        if self._tells_terms:
            hello.revision = self._revision
            hello.compatibility = compatibility_digest(self.wiring.compatibility)
        stages = StageMetrics(self.registry).of(self.role, "fake")
        self.service = WorkerService(
            self.engine,
            hello,
            self.routers,
            self.prefill,
            self.decode,
            self._tempo,
            stages,
            keys=self._keys,
        )
        loop = EngineLoop(self.engine, self.service.on_outputs, self._fail_step, self.service.on_start)
        self.health = HealthServicer()
        self.drain = Drain(self.service, self.routers, self.prefill.links, loop, self.health)
        self.switch = self.service.switching = RoleSwitch(
            self.post,
            self.drain,
            lambda post: self._take_post(post, hello),
            SwitchMetrics(self.registry),
            keys=self._keys,
            timeout=None,
        )
        worker_pb2_grpc.add_WorkerServicer_to_server(self.service, server)
        beats = BeatService(self.routers, self._keys, BeatMetrics(self.registry))
        worker_pb2_grpc.add_RouterPulseServicer_to_server(beats, server)
        handoff_pb2_grpc.add_HandoffServicer_to_server(self.decode, server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, server)
        self._stack.push_async_callback(self._ends.close)
        self._stack.push_async_callback(self.prefill.links.close)
        self.decode.data_addresses = await self._ends.listen([RankAddress("127.0.0.1", "127.0.0.1")], 0)
        loop.start()
        self._stack.callback(loop.stop)
        await server.start()
        self._stack.push_async_callback(server.stop, 0.2)
        self._stack.callback(self.routers.close)
        for timer in start_timers(self.wiring.tasks, self.service, self.prefill, self.decode, crash):
            self._stack.callback(timer.cancel)

    def _fail_step(self) -> None:
        self.crashed.set()
        self.on_failed_step()

    def _take_post(self, post: RoleIncarnation, hello: worker_pb2.WorkerHello) -> None:
        self.post = post
        self.wiring = replace(self.wiring, incarnation=post.incarnation)
        self.prefill.rename(self.wiring)
        self.decode.rename(self.wiring)
        hello.role, hello.incarnation = role_to_proto(post.role), post.incarnation
        self.service.greet_anew(hello)

    def _wiring(self) -> Wiring:
        return Wiring(
            incarnation=self.incarnation,
            address=self.address,
            ends=self._ends,
            compatibility=handoff_pb2.Compatibility(
                protocol=PROTOCOL,
                block_size=4,
                revision=self._revision,
                groups=[
                    wire.spec_of(group.kv, part)
                    for group, part in zip(self._layout.groups, self._share.groups, strict=True)
                ],
            ),
            metrics=HandoffMetrics(self.registry, self.role),
            dialer=Dialer(self._tls),
            tasks=Supervision(TaskMetrics(self.registry)),
            keys=self._keys,
        )

    async def stop(self) -> None:
        await self._stack.aclose()

    @property
    def incarnation(self) -> str:
        return self.post.incarnation

    @property
    def held(self) -> int:
        """KV blocks that a sequence or a transfer holds."""
        return self.engine.stats().blocks.held


@asynccontextmanager
async def local_ring(
    workers: Sequence[LocalWorker],
    tempo: Tempo = TEMPO,
    policy: RetryPolicy | None = None,
    metrics: ResumeMetrics | None = None,
    placement: PlacementOptions = SPLIT,
    discovery: Callable[[], Discovery] | None = None,
    tls: TlsFiles | None = None,
    keys: ClusterKeys = KEYS,
) -> AsyncIterator[WorkerRing]:
    """Start the workers and a router's ring before them, and end them all. ``discovery`` is made when the
    workers have their addresses; without it they are a fixed list. AssertionError if a step of a worker that
    is not ``mortal`` fails: its process would end, but here its clients would wait for ever."""
    async with AsyncExitStack() as stack:
        for worker in workers:
            await worker.start()
            stack.push_async_callback(worker.stop)
        found = [worker.address for worker in workers] if discovery is None else discovery()
        retries = Retries(policy or RetryPolicy())
        dialer = Dialer(tls)
        ring = WorkerRing(found, "fake", keys, tempo, retries, metrics, placement, dialer=dialer)
        ring.start()
        stack.push_async_callback(ring.close)
        await until(
            lambda: len(ring.fleet.workers) >= len(workers) and all(c.ready for c in ring.fleet.workers)
        )
        async with _none_failing(workers):
            yield ring


@asynccontextmanager
async def _none_failing(workers: Sequence[LocalWorker]) -> AsyncIterator[None]:
    """Interrupt what runs inside, with AssertionError, when a step of a worker fails that may not."""
    limit = asyncio.timeout(None)

    def interrupt() -> None:
        if not limit.expired():
            limit.reschedule(0.0)

    watched = [worker for worker in workers if not worker.mortal]
    try:
        async with limit:
            for worker in watched:
                worker.on_failed_step = interrupt
            try:
                yield
            finally:
                for worker in watched:
                    worker.on_failed_step = lambda: None
    except TimeoutError:
        if limit.expired():
            raise AssertionError("a step of a worker failed; its log says why") from None
        raise


async def until(condition: Callable[[], object], seconds: float = 5.0) -> None:
    """Wait until ``condition()`` is true; TimeoutError when it does not become so."""
    async with asyncio.timeout(seconds):
        for _ in iter(lambda: bool(condition()), True):
            await asyncio.sleep(0.005)


async def answer(
    ring: WorkerRing,
    request_id: str,
    prompt: Sequence[int],
    max_tokens: int,
    priority: Priority = NO_PRIORITY,
) -> list[int]:
    """The tokens of one greedy request. Raises RingError."""
    tokens, _ = await salted_answer(ring, request_id, prompt, max_tokens, b"", priority)
    return tokens


async def salted_answer(
    ring: WorkerRing,
    request_id: str,
    prompt: Sequence[int],
    max_tokens: int,
    salt: bytes,
    priority: Priority = NO_PRIORITY,
) -> tuple[list[int], int]:
    """Likewise, within a salt; and how many tokens of the prompt were cached."""
    params = ResolvedSampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    tokens: list[int] = []
    cached = 0
    with ring.generate(list(prompt), [Request(request_id, params, salt)], priority) as [chunks]:
        async for chunk in chunks:
            tokens += chunk.token_ids
            cached += chunk.cached_tokens
    return tokens, cached
