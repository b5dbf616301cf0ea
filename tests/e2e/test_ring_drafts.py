"""A ring whose decode worker drafts says what one says that does not, over each connector and with each
method."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import httpx
import pytest

from tests.support.ring import Ring, running, running_routers, worker

pytestmark = [pytest.mark.beside, pytest.mark.deep]

NGRAM = ("--speculative-method", "ngram", "--num-speculative-tokens", "5")
UCX = {"ucx": ("--connector", "ucx", *NGRAM)} if importlib.util.find_spec("ucxx") else {}
DECODES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "tcp": ("--connector", "tcp", *NGRAM),
        "draft": ("--connector", "tcp", "--speculative-method", "draft", "--speculative-model", "demo"),
        **UCX,
    }
)
"""Ring → the options of its decode worker."""
QUESTION = "What is a KV cache?"
GREEDY = {"temperature": 0, "max_tokens": 60}
DRAWN = {"temperature": 0.7, "seed": 3, "max_tokens": 60, "logprobs": True, "top_logprobs": 2}


@pytest.fixture(scope="module")
def rings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Ring]]:
    """They share the prefill worker, which is given such options as well."""
    tmp = tmp_path_factory.mktemp("speculation")
    prefill = worker(tmp, "prefill", "prefill", "demo", *NGRAM)
    decodes = {
        name: worker(tmp, f"decode-{name}", "decode", "demo", *options) for name, options in DECODES.items()
    }
    with (
        running([prefill, *decodes.values()]),
        running_routers(
            tmp, "demo", {name: [prefill, decode] for name, decode in decodes.items()}
        ) as routers,
    ):
        yield routers


def speculation(ring: Ring) -> dict[str, float]:
    """What the decode worker has counted."""
    [decode] = ring.of_role("decode")
    prefix = "baton_speculation_"
    return {
        name.removeprefix(prefix).partition("_total")[0]: value
        for name, value in decode.metrics().items()
        if name.startswith(prefix) and "_created" not in name
    }


def messages(answer: str) -> list[dict[str, str]]:
    """A chat whose last question is the first once more: the answer is in the prompt."""
    asked = {"role": "user", "content": QUESTION}
    return [asked, {"role": "assistant", "content": answer}, asked]


async def ask(ring: Ring, **fields: object) -> Any:
    async with httpx.AsyncClient(base_url=ring.url, timeout=120) as client:
        response = await client.post("/v1/chat/completions", json={"model": "demo", **fields})
        assert response.status_code == 200, response.text
        return response.json()["choices"]


async def streamed(ring: Ring, **fields: object) -> str:
    text = ""
    async with (
        httpx.AsyncClient(base_url=ring.url, timeout=120) as client,
        client.stream(
            "POST", "/v1/chat/completions", json={"model": "demo", "stream": True, **fields}
        ) as response,
    ):
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
    return text


def said(choice: Any) -> tuple[str, str]:
    return choice["message"]["content"], choice["finish_reason"]


@pytest.mark.parametrize("name", DECODES)
async def test_answers_are_the_same_and_drafts_are_accepted(
    rings: dict[str, Ring], demo_ring: Ring, name: str
) -> None:
    ring = rings[name]
    [first] = await ask(demo_ring, messages=[{"role": "user", "content": QUESTION}], **GREEDY)
    chat = messages(first["message"]["content"])
    before = speculation(ring)

    [plain] = await ask(demo_ring, messages=chat, **GREEDY)
    [drafted] = await ask(ring, messages=chat, **GREEDY)
    assert said(drafted) == said(plain)
    assert await streamed(ring, messages=chat, **GREEDY) == said(plain)[0]

    plain_drawn = await ask(demo_ring, messages=chat, n=3, **DRAWN)
    drafted_drawn = await ask(ring, messages=chat, n=3, **DRAWN)
    assert [said(choice) for choice in drafted_drawn] == [said(choice) for choice in plain_drawn]
    for ours, theirs in zip(drafted_drawn, plain_drawn, strict=True):
        told = [[token["logprob"] for token in c["logprobs"]["content"]] for c in (ours, theirs)]
        assert told[0] == pytest.approx(told[1], abs=1e-4)

    counted = {name: value - before[name] for name, value in speculation(ring).items()}
    assert counted["accepted_tokens"] / counted["verifications"] + 1 > 1.8
    assert counted["accepted_tokens"] <= counted["drafted_tokens"]
    ring.wait_idle()


@pytest.mark.parametrize("stop", ["attention keys", "memory that"])
async def test_a_stop_string_among_the_accepted(rings: dict[str, Ring], demo_ring: Ring, stop: str) -> None:
    [first] = await ask(demo_ring, messages=[{"role": "user", "content": QUESTION}], **GREEDY)
    chat = messages(first["message"]["content"])
    plain = await ask(demo_ring, messages=chat, stop=[stop], **GREEDY)
    for ring in rings.values():
        drafted = await ask(ring, messages=chat, stop=[stop], **GREEDY)
        assert said(drafted[0]) == said(plain[0])
        assert said(drafted[0])[1] == "stop"
        ring.wait_idle()


async def test_many_at_once(rings: dict[str, Ring], demo_ring: Ring) -> None:
    """Copies of what is in the prompt beside answers that have nothing to copy."""
    [first] = await ask(demo_ring, messages=[{"role": "user", "content": QUESTION}], **GREEDY)
    chats = [messages(first["message"]["content"]), [{"role": "user", "content": "What is prefill?"}]]
    asked = [{"messages": chats[i % 2], **DRAWN, "seed": i} for i in range(8)]
    plain = await asyncio.gather(*(ask(demo_ring, **each) for each in asked))
    for ring in rings.values():
        drafted = await asyncio.gather(*(ask(ring, **each) for each in asked))
        assert [said(choice) for [choice] in drafted] == [said(choice) for [choice] in plain]
        ring.wait_idle()
