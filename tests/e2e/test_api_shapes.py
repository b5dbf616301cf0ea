"""Responses, messages and several models, through a ring of real processes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from baton.process.ready import WorkerReady
from baton.v1 import inference_pb2 as pb
from baton.v1.inference_pb2_grpc import InferenceStub
from tests.support.ring import Ring, Service, scrape

pytestmark = pytest.mark.beside

QUESTION = "What is Baton?"


async def test_a_response_is_a_chat(demo_ring: Ring) -> None:
    """Whole and streamed, it tells what a chat completion tells."""
    async with AsyncOpenAI(base_url=f"{demo_ring.url}/v1", api_key="none", max_retries=0) as client:
        chat = await client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": QUESTION}], temperature=0
        )
        whole = await client.responses.create(model="demo", input=QUESTION, temperature=0, store=False)
        async with client.responses.stream(model="demo", input=QUESTION, temperature=0) as stream:
            pieces = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            streamed = await stream.get_final_response()
    text = chat.choices[0].message.content
    assert whole.output_text == streamed.output_text == "".join(pieces) == text and len(pieces) > 1
    assert whole.usage is not None and chat.usage is not None
    assert whole.usage.output_tokens == chat.usage.completion_tokens
    assert whole.status == streamed.status == "completed"
    demo_ring.wait_idle()


async def test_a_message_is_a_chat(demo_ring: Ring) -> None:
    async with AsyncAnthropic(base_url=demo_ring.url, api_key="none", max_retries=0) as client:
        turns: list = [{"role": "user", "content": QUESTION}]  # type: ignore[type-arg]
        ask: dict = {"model": "demo", "max_tokens": 64, "messages": turns}  # type: ignore[type-arg]
        whole = await client.messages.create(**ask, extra_body={"temperature": 0})
        async with client.messages.stream(**ask, extra_body={"temperature": 0}) as stream:
            pieces = [text async for text in stream.text_stream]
            streamed = await stream.get_final_message()
        counted = await client.messages.count_tokens(model="demo", messages=turns)
    assert "Baton" in whole.content[0].text and len(pieces) > 1
    assert whole.content[0].text == streamed.content[0].text == "".join(pieces)
    usage = whole.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert whole.stop_reason == streamed.stop_reason == "end_turn"
    demo_ring.wait_idle()


@pytest.fixture(scope="module")
def several(demo_ring: Ring, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A router of two models, which are the same workers."""
    tmp = tmp_path_factory.mktemp("several")
    workers = [w.ready.address for w in demo_ring.workers if isinstance(w.ready, WorkerReady)]
    entries = [
        {"name": "one", "aliases": ["uno"], "model": "demo", "workers": workers},
        {"name": "two", "model": "demo", "workers": workers},
    ]
    (tmp / "models.json").write_text(json.dumps(entries))
    argv = ("router", "--models", str(tmp / "models.json"), "--port", "0", "--grpc-port", "0")
    router = Service("several", (*argv, "--allowed-origins", "https://a.example"), tmp / "router.log")
    router.start()
    try:
        router.wait_ready()
        yield router
    finally:
        router.stop()


async def test_several_models(several: Service, tmp_path: Path) -> None:
    url, grpc_address = f"http://{several.ready.http}", several.ready.grpc
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        deadline = time.monotonic() + 30
        health: dict[str, object] = {}
        while health.get("models") != {"one": "ok", "two": "ok"}:
            assert time.monotonic() < deadline, health
            health = (await client.get("/health")).json()
        listed = [entry["id"] for entry in (await client.get("/v1/models")).json()["data"]]
        assert listed == ["one", "uno", "two"]
        texts = {}
        for asked, name in ((None, "one"), ("uno", "one"), ("two", "two")):
            body = {"model": asked, "prompt": "Paged attention is", "max_tokens": 8, "temperature": 0}
            answer = await client.post("/v1/completions", json=body, headers={"origin": "https://a.example"})
            assert answer.status_code == 200 and answer.json()["model"] == name
            assert answer.headers["access-control-allow-origin"] == "https://a.example"
            texts[asked] = answer.json()["choices"][0]["text"]
        assert len(set(texts.values())) == 1
        assert (
            await client.post("/v1/completions", json={"model": "three", "prompt": "x"})
        ).status_code == 404
    ready = [name for name in scrape(f"{url}/metrics") if name.startswith("baton_worker_ready{")]
    assert len(ready) == 4 and sum('model="two"' in name for name in ready) == 2
    assert grpc_address is not None
    async with grpc.aio.insecure_channel(grpc_address) as channel:
        request = pb.GenerateRequest(model="two", text="x", params=pb.SamplingParams(max_tokens=4))
        frames = [frame async for frame in InferenceStub(channel).Generate(request)]
    assert frames[-1].usage.completion_tokens == 4
