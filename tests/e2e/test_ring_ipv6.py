"""Rings that have nothing but IPv6: routers, workers, ranks, links and metrics on ``::1``."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import psutil
import pytest

from baton.process import ready
from baton.v1 import inference_pb2, inference_pb2_grpc
from tests.support.clients import RingClient
from tests.support.deep import all_deep_but
from tests.support.ipv6 import needs_ipv6
from tests.support.nixl import needs_nixl
from tests.support.ring import Ring, running_ring, scrape

pytestmark = [pytest.mark.beside, needs_ipv6]

PROMPT = "Baton is a server for large language models, and this is a prompt of some length. " * 3
CONNECTORS = (
    "tcp",
    pytest.param(
        "ucx",
        marks=pytest.mark.skipif(
            importlib.util.find_spec("ucxx") is None,
            reason="NOT TESTED: ucxx is not installed (pip install 'baton[ucx]')",
        ),
    ),
    pytest.param("nixl", marks=needs_nixl),
    "gloo",
)
HERE = ("--host", "::1")


@pytest.fixture(scope="module", params=all_deep_but(CONNECTORS[2:3], CONNECTORS))
def ring(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    """Decode has two ranks."""
    with running_ring(
        tmp_path_factory.mktemp("ring"),
        options=(*HERE, "--connector", request.param, "--verify-handoff"),
        decode_options=("--tensor-parallel-size", "2"),
        router_options=HERE,
    ) as running:
        yield running


async def answers(ring: Ring) -> list[list[int]]:
    """Over HTTP and over gRPC."""
    async with RingClient(ring.url, "demo") as client:
        over_http = await client.complete(PROMPT, max_tokens=8, temperature=0)
    params = inference_pb2.SamplingParams(max_tokens=8, temperature=0)
    request = inference_pb2.GenerateRequest(model="demo", text=PROMPT, params=params)
    async with grpc.aio.insecure_channel(ring.grpc) as channel:
        calls = inference_pb2_grpc.InferenceStub(channel).Generate(request)
        over_grpc = [token async for response in calls for token in response.token_ids]
    return [over_http.token_ids, over_grpc]


async def test_kv_blocks_are_handed_over(ring: Ring) -> None:
    over_http, over_grpc = await answers(ring)
    assert len(over_http) == 8
    assert over_http == over_grpc
    said = [worker.ready for worker in ring.workers]
    for message in said:
        assert isinstance(message, ready.WorkerReady)
        assert message.address.startswith("[::1]:")
        assert message.metrics is not None and message.metrics.startswith("[::1]:")
    assert ring.url.startswith("http://[::1]:") and ring.grpc.startswith("[::1]:")
    counted = ring.of_role("decode")[0].metrics()
    assert sum(v for name, v in counted.items() if name.startswith("baton_handoffs_completed")) >= 1
    assert sum(v for name, v in counted.items() if name.startswith("baton_handoffs_aborted")) == 0
    assert all(v for k, v in scrape(f"{ring.url}/metrics").items() if k.startswith("baton_worker_ready"))


def test_ranks_are_reached_by_ipv6_alone(ring: Ring) -> None:
    """What listens on IPv4 is where the ranks of one worker meet, on its own loopback."""
    decode = psutil.Process(ring.of_role("decode")[0].process.pid)
    prefill = psutil.Process(ring.of_role("prefill")[0].process.pid)
    [rank] = decode.children()
    there = {c.laddr.port for c in rank.net_connections("tcp6") if c.status == psutil.CONN_LISTEN}
    linked = {c.raddr.port for c in prefill.net_connections("tcp6") if c.status == psutil.CONN_ESTABLISHED}
    assert there & linked, "prefill has a data connection to the second rank"
    assert not [c for c in prefill.net_connections("tcp4") if c.status == psutil.CONN_LISTEN]


@pytest.mark.deep
async def test_baton_up(tmp_path: Path) -> None:
    log = tmp_path / "log"
    argv = ["up", *HERE, "--port", "0", "--grpc-port", "0", "--dtype", "float32", "--threads-per-worker", "1"]
    with log.open("wb") as out:
        up = subprocess.Popen(  # noqa: ASYNC220 (nothing else waits here)
            [
                sys.executable,
                "-m",
                "baton",
                *argv,
                "--kv-cache-memory",
                "64MiB",
                "--prompt",
                "What is Baton?",
            ],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )
    try:
        async with asyncio.timeout(120):
            while "serving; Ctrl-C" not in (said := log.read_text()):
                assert up.poll() is None, said
                await asyncio.sleep(0.1)
        assert re.search(r"prefill: ready on \[::1\]:\d+", said) and re.search(
            r"decode: ready on \[::1\]", said
        )
        assert re.search(r"tokens; the first came", said), said
        url = re.search(r"ready on (http://\[::1\]:\d+), gRPC on \[::1\]:\d+", said)
        assert url is not None, said
        body = {"model": "demo", "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
        async with httpx.AsyncClient(timeout=60) as client:
            answer = await client.post(f"{url[1]}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert json.loads(answer.text)["usage"]["completion_tokens"] == 4
    finally:
        up.send_signal(signal.SIGINT)
        await asyncio.to_thread(up.wait, 30)
    assert up.returncode == 0
