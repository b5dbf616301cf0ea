"""A planner before a real ring and a real Prometheus: its questions have answers, and a worker switches."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from baton.greeting.cluster_key import ClusterKeys
from baton.net.channels import Dialer
from baton.planner.measured import Counts, Measured, MeasuredFleet
from baton.planner.prometheus import Prometheus
from baton.planner.queries import IncompleteError, Queries, measure
from baton.planner.workers import Workers, count_ready, count_strays, read_reports, to_switch
from baton.process.ready import WorkerReady
from baton.router.discovery.endpoint import Endpoint
from tests.support.clients import RingClient
from tests.support.planning import counts, fleet
from tests.support.prometheus import needs_prometheus, running_prometheus
from tests.support.ring import CLUSTER_KEY, Ring, running, running_routers, simulated

PATIENCE_S = 120.0


def addresses(ring: Ring) -> list[str]:
    pages = [service.ready.metrics for service in ring.workers if isinstance(service.ready, WorkerReady)]
    return [ring.url.removeprefix("http://"), *(str(page) for page in pages)]


def endpoints(ring: Ring) -> list[Endpoint]:
    """As their Deployments' slices would have them."""
    return [
        Endpoint(address=service.ready.address, role=service.ready.role)  # type: ignore[arg-type]
        for service in ring.workers
        if isinstance(service.ready, WorkerReady)
    ]


async def ask_on(client: RingClient) -> None:
    while True:
        asked = [client.stream([7 + n] * 300, max_tokens=40, temperature=0) for n in range(4)]
        await asyncio.gather(*asked)


async def complete(prometheus: Prometheus, queries: Queries, there: MeasuredFleet) -> Measured:
    """As soon as every figure has a value."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            seen = await measure(prometheus, queries, there, time.monotonic())
            known = [seen.arrivals.answer_tokens, seen.prefill.tokens_per_s, seen.prefill.before_s]
            known += [seen.decode.step_base_s, seen.decode.step_s, seen.arrivals.prompt_tokens_per_s]
            if (all(known) and seen.decode.step_rows) or time.monotonic() > deadline:
                return seen
        except IncompleteError:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(0.2)


@pytest.mark.deep
@needs_prometheus
async def test_a_ring_is_measured_and_a_worker_switched(tmp_path: Path) -> None:
    workers = [simulated(tmp_path, f"w{n}", role) for n, role in enumerate(("prefill", "decode", "decode"))]
    with running(workers), running_routers(tmp_path, "demo", {"ring": workers}) as rings:
        ring = rings["ring"]
        labels = {"namespace": "serving"}
        with running_prometheus(tmp_path, addresses(ring), every="500ms", labels=labels) as server:
            async with RingClient(ring.url, "demo") as client, Prometheus(server.url) as prometheus:
                queries = Queries('namespace="serving"')
                asking = asyncio.create_task(ask_on(client))
                seen = await complete(prometheus, queries, fleet(counts(1, 2)))
                check_figures(seen)
                await switch(ring, prometheus, queries)
                assert not asking.done(), "it was asked on, and answered, all the while"
                asking.cancel()
                await asyncio.wait((asking,))


def check_figures(seen: Measured) -> None:
    """What the profile ``8b-h100`` and the requests make of them."""
    assert seen.missing() == ""
    assert seen.age_s < 5
    assert seen.arrivals.requests_per_s > 0
    assert seen.arrivals.answer_tokens == pytest.approx(40)
    assert seen.prefill.tokens_per_s > 1000
    assert seen.decode.blocks > 0
    assert seen.decode.step_base_s == pytest.approx(0.008, rel=0.5)
    assert 0 < seen.decode.step_s < 0.1


async def switch(ring: Ring, prometheus: Prometheus, queries: Queries) -> None:
    """By its own word first, then by the routers'."""
    asking, known = Workers(ClusterKeys(CLUSTER_KEY.encode()), Dialer()), endpoints(ring)
    before = asking.ready(known, await read_reports(prometheus, queries.selector))
    assert count_ready(before) == counts(1, 2)
    ended: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    [chosen] = to_switch(before, "prefill", 1)
    asking.switch(chosen, "prefill", lambda worker, what: ended.set_result(what))
    assert chosen.address in asking.switching
    assert isinstance(await ended, float)
    await asyncio.sleep(0)  # it is no longer under way
    after = asking.ready(known, await read_reports(prometheus, queries.selector))
    assert count_ready(after) == counts(2, 1)
    assert count_strays(after) == Counts(prefill=1, decode=0)
    deadline = time.monotonic() + PATIENCE_S
    while (await read_reports(prometheus, queries.selector)).roles.get(chosen.address) != "prefill":
        assert time.monotonic() < deadline, "the routers have not told of the new role"
        await asyncio.sleep(0.2)
    await asking.close()
