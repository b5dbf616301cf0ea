"""Answers have the shape that vLLM's have, down to null fields, and strict clients take them."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseCompletedEvent, ResponseIncompleteEvent

from baton.router.api.settings import ApiSettings
from baton.text.tokenizer import Tokenizer
from tests.support.api_server import serving, until
from tests.support.fake_ring import FakeRing
from tests.support.scripted_ring import ring_of
from tests.support.tiny_tokenizers import TOOL_TEMPLATE, byte_level_tokenizer

Body = dict[str, Any]

USER = {"role": "user", "content": "Hello"}
CONTINUOUS: Body = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
ALWAYS = {"kv_transfer_params", "ec_transfer_params", "metrics", "service_tier"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level_tokenizer(tmp_path_factory.mktemp("model"), template=TOOL_TEMPLATE)


class Api:
    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client

    async def post(self, path: str, **fields: object) -> Body:
        answer = await self.client.post(path, json=fields)
        assert answer.status_code == 200, answer.text
        body: Body = answer.json()
        return body

    async def events(self, path: str, **fields: object) -> list[Body]:
        text = (await self.client.post(path, json={"stream": True, **fields})).text
        return [json.loads(data) for data in re.findall(r"^data: (\{.*)$", text, re.MULTILINE)]


@asynccontextmanager
async def api_of(
    ring: FakeRing, tokenizer: Tokenizer, settings: ApiSettings | None = None
) -> AsyncIterator[Api]:
    async with serving(ring, tokenizer, settings) as url, httpx.AsyncClient(base_url=url) as client:
        yield Api(client)


CHAT, COMPLETION, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"


# -- the last event of a stream


@pytest.mark.parametrize("parser", ["none", "auto"])
async def test_the_last_text_comes_with_all_that_belongs_to_it(tokenizer: Tokenizer, parser: str) -> None:
    """Whether the text is parsed or not: text, log-probabilities, tokens and finish reason are one event."""
    ring = FakeRing(lambda call: tokenizer.encode("Hello fox"))
    asked: Body = {"messages": [USER], "logprobs": True, "return_token_ids": True}
    async with api_of(ring, tokenizer, ApiSettings(reasoning_parser=parser)) as api:
        for most in (3, 5):
            _, *events = await api.events(CHAT, max_tokens=most, **asked)
            choices = [event["choices"][0] for event in events]
            for choice in choices:
                told = [entry["token"] for entry in choice["logprobs"]["content"]]
                assert len(told) == len(choice["token_ids"]) == 1
                assert "".join(told) == choice["delta"]["content"]
            assert [choice["finish_reason"] for choice in choices] == [None] * (most - 1) + ["length"]
            assert choices[-1]["stop_reason"] is None and "stop_reason" not in choices[0]


async def test_a_finish_reason_behind_a_call_is_alone(tokenizer: Tokenizer) -> None:
    """OpenAI's client begins a call with one event and ends it with another."""
    ring = ring_of(tokenizer, CALL, per_chunk=500)
    asked: Body = {"messages": [USER], "tools": [NOW], "logprobs": True, "return_token_ids": True}
    async with api_of(ring, tokenizer) as api:
        _, call, end = [event["choices"][0] for event in await api.events(CHAT, **asked)]
    assert call["delta"]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
    assert call["finish_reason"] is None and call["token_ids"]
    assert len(call["logprobs"]["content"]) == len(call["token_ids"])
    assert (end["delta"], end["finish_reason"], end["token_ids"]) == ({}, "tool_calls", [])
    assert end["logprobs"] is None


@pytest.mark.parametrize("parser", ["none", "auto"])
async def test_continuous_usage_counts_up(tokenizer: Tokenizer, parser: str) -> None:
    ring = FakeRing(lambda call: tokenizer.encode("Hello fox"))
    ring.cached_tokens = 2
    async with api_of(ring, tokenizer, ApiSettings(reasoning_parser=parser)) as api:
        events = await api.events(CHAT, messages=[USER], max_tokens=4, **CONTINUOUS)
        plain = await api.events(CHAT, messages=[USER], max_tokens=4, stream_options={"include_usage": True})
    usages = [event["usage"] for event in events]
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert [usage["completion_tokens"] for usage in usages] == [0, 1, 2, 3, 4, 4]
    assert not events[-1]["choices"]
    for usage in usages:
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert usage["prompt_tokens"] == usages[-1]["prompt_tokens"] > 0
        assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
    assert [event["usage"] for event in plain[:-1]] == [None] * (len(plain) - 1)


# -- null fields


@pytest.mark.parametrize("ids", [False, True])
async def test_a_completion_has_vllms_fields(tokenizer: Tokenizer, ids: bool) -> None:
    ring = ring_of(tokenizer, "Hello")
    async with api_of(ring, tokenizer) as api:
        whole = await api.post(COMPLETION, prompt="a", max_tokens=99, return_token_ids=ids)
        told = await api.post(COMPLETION, prompt="ab", max_tokens=99, prompt_logprobs=0)
        events = await api.events(COMPLETION, prompt="a", max_tokens=99, return_token_ids=ids)
    [choice] = whole["choices"]
    assert {name: whole[name] for name in ALWAYS} == dict.fromkeys(ALWAYS)
    assert choice["prompt_logprobs"] is None and choice["routed_experts"] is None
    assert told["choices"][0]["prompt_logprobs"]
    parsed = Completion.model_validate(whole).choices[0]
    assert parsed.prompt_logprobs is None  # type: ignore[attr-defined]
    for each in (choice, *(event["choices"][0] for event in events)):
        assert {"stop_reason", "token_ids", "prompt_token_ids"} <= each.keys()
        assert (each["token_ids"] is not None) == ids
    assert (choice["prompt_token_ids"] is not None) == ids
    first, *others = [event["choices"][0]["prompt_token_ids"] for event in events]
    assert (first is not None) == ids and others == [None] * len(others)


@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("parser", ["none", "auto"])
async def test_a_chat_has_vllms_fields(tokenizer: Tokenizer, ids: bool, parser: str) -> None:
    ring = ring_of(tokenizer, "Hello")
    asked: Body = {"messages": [USER], "return_token_ids": ids}
    async with api_of(ring, tokenizer, ApiSettings(reasoning_parser=parser)) as api:
        whole = await api.post(CHAT, **asked)
        told = await api.post(CHAT, messages=[USER], prompt_logprobs=0)
        events = await api.events(CHAT, **asked)
    assert {name: whole[name] for name in ALWAYS} == dict.fromkeys(ALWAYS)
    assert whole["prompt_logprobs"] is None and whole["prompt_text"] is None
    assert told["prompt_logprobs"] and (whole["prompt_token_ids"] is not None) == ids
    assert (whole["choices"][0]["token_ids"] is not None) == ids
    ChatCompletion.model_validate(whole, strict=True)
    for event in events:
        ChatCompletionChunk.model_validate(event, strict=True)
    assert (events[0]["prompt_token_ids"] is not None) == ids
    assert "token_ids" not in events[0]["choices"][0]
    for event in events[1:]:
        assert "prompt_token_ids" not in event
        assert (event["choices"][0]["token_ids"] is not None) == ids


async def test_a_response_tells_what_was_written_to_a_cache(tokenizer: Tokenizer) -> None:
    ring = ring_of(tokenizer, "Hello fox")
    async with api_of(ring, tokenizer) as api:
        for most, kind, type_ in (
            (99, ResponseCompletedEvent, "response.completed"),
            (2, ResponseIncompleteEvent, "response.incomplete"),
        ):
            whole = await api.post(RESPONSE, input="Hello", max_output_tokens=most)
            last = (await api.events(RESPONSE, input="Hello", max_output_tokens=most))[-1]
            assert last["type"] == type_
            kind.model_validate(last, strict=True)
            for response in (whole, last["response"]):
                assert Response.model_validate(response, strict=True).usage is not None
                assert response["usage"]["input_tokens_details"] == {
                    "cached_tokens": 0,
                    "cache_write_tokens": 0,
                }


# -- characters that are cut off

SMILE = "🙂".encode()


def byte_tokens(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """The tokens of ``data``, a byte each."""
    token_of = {tokenizer.token_bytes(id_): id_ for id_ in range(tokenizer.vocab_size)}
    return [token_of[bytes([byte])] for byte in data]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"ab" + SMILE[:3], "ab"),
        (SMILE[:1], ""),
        (SMILE[1:3], ""),
        (b"a\xa6\xa6", "a"),
        (b"a\xa6b", "a�b"),
        (SMILE[:2] + b"b\xa6c" + SMILE[:1], "�b�c"),
        (b"a" + SMILE, "a🙂"),
    ],
    ids=str,
)
async def test_a_cut_character_at_the_end_is_left_out(tokenizer: Tokenizer, data: bytes, text: str) -> None:
    """As vLLM does; one within the answer is replaced."""
    ids = byte_tokens(tokenizer, data)
    ring = FakeRing(lambda call: ids)
    most = len(ids)
    user: Body = {"messages": [USER], "max_tokens": most}
    async with api_of(ring, tokenizer) as api:
        whole = await api.post(COMPLETION, prompt="a", max_tokens=most, return_token_ids=True, logprobs=0)
        assert (whole["choices"][0]["text"], whole["choices"][0]["token_ids"]) == (text, ids)
        assert len(whole["choices"][0]["logprobs"]["tokens"]) == most, "each token is told"
        events = await api.events(COMPLETION, prompt="a", max_tokens=most)
        assert "".join(event["choices"][0]["text"] for event in events) == text
        assert (await api.post(CHAT, **user))["choices"][0]["message"]["content"] == text
        events = await api.events(CHAT, **user)
        assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == text
        content = (await api.post("/v1/messages", **user))["content"]
        assert "".join(block["text"] for block in content) == text
        output = (await api.post(RESPONSE, input="Hello", max_output_tokens=most))["output"]
        assert "".join(item["content"][0]["text"] for item in output) == text


# -- pages, and what load balancers ask


async def test_no_page_loads_anything_from_elsewhere(tokenizer: Tokenizer) -> None:
    async with api_of(ring_of(tokenizer, "a"), tokenizer) as api:
        for path in ("/docs", "/redoc", "/docs/oauth2-redirect"):
            answer = await api.client.get(path)
            assert answer.status_code == 404 and "cdn" not in answer.text
        assert (await api.client.get("/openapi.json")).json()["paths"]


async def test_ping_is_health(tokenizer: Tokenizer) -> None:
    ring = ring_of(tokenizer, "a")
    async with api_of(ring, tokenizer) as api:
        for ready, status in ((True, 200), (False, 503)):
            ring.ready = ready
            for answer in (await api.client.get("/ping"), await api.client.post("/ping")):
                assert answer.status_code == status


async def test_load_counts_requests(tokenizer: Tokenizer) -> None:
    ring = FakeRing(lambda call: tokenizer.encode("a"))
    ring.delay = 0.02

    async with api_of(ring, tokenizer) as api:
        assert (await api.client.get("/load")).json() == {"server_load": 0}
        async with (
            api.client.stream("POST", CHAT, json={"messages": [USER], "stream": True, "max_tokens": 200}),
            api.client.stream("POST", COMPLETION, json={"prompt": "a", "stream": True, "max_tokens": 200}),
        ):
            assert (await api.client.get("/load")).json() == {"server_load": 2}
        await until(lambda: all(call.closed or call.finished for call in ring.calls))
        assert (await api.client.get("/load")).json() == {"server_load": 0}
