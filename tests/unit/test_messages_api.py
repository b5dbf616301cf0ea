"""``/v1/messages`` as Anthropic's own client sees it, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import anthropic
import httpx
import pytest
from prometheus_client import CollectorRegistry

from baton.router.api.http.app import app_for
from baton.router.api.service import CompletionService
from baton.router.api.settings import ApiSettings
from baton.router.dispatch.types import RingError
from baton.router.shared.limits import Limits, Tenant
from baton.telemetry.metrics import RouterMetrics
from baton.text.tokenizer import Tokenizer
from tests.support.api_server import serving, serving_app
from tests.support.fake_ring import FakeRing, busy
from tests.support.scripted_ring import prompt_of, ring_of
from tests.support.tiny_tokenizers import TOOL_TEMPLATE, byte_level_tokenizer

WEATHER: dict[str, object] = {
    "name": "get_weather",
    "description": "Get the temperature.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
ANSWER = "Ulm has 9 °C."
SWITCHED = TOOL_TEMPLATE.replace("if opens", "if enable_thinking")
ASK = {"max_tokens": 100, "messages": [{"role": "user", "content": "x"}]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level_tokenizer(tmp_path_factory.mktemp("model"), template=TOOL_TEMPLATE)


def client_of(url: str) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0)


async def events_of(url: str, **fields: object) -> list[dict]:  # type: ignore[type-arg]
    found = []
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        body = {**ASK, "stream": True, **fields}
        async with client.stream("POST", "/v1/messages", json=body) as response:
            assert response.status_code == 200, await response.aread()
            kind = ""
            async for line in response.aiter_lines():
                if line.startswith("event: "):
                    kind = line.removeprefix("event: ")
                elif line:
                    event = json.loads(line.removeprefix("data: "))
                    assert event["type"] == kind
                    found.append(event)
    assert [event["type"] for event in found[:2]] == ["message_start", "ping"]
    return found


async def test_a_text(tokenizer: Tokenizer) -> None:
    ring = ring_of(tokenizer, ANSWER)
    ring.cached_tokens = 2
    async with serving(ring, tokenizer) as url, client_of(url) as client:
        message = await client.messages.create(
            model="tiny",
            max_tokens=100,
            system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            messages=[{"role": "user", "content": "How warm?"}],
            metadata={"user_id": "u"},
        )
    assert prompt_of(tokenizer, ring) == (
        "<|start|>system\nBe brief.<|end|>\n<|start|>user\nHow warm?<|end|>\n<|start|>assistant\n"
    )
    assert message.id.startswith("msg_") and (message.role, message.model) == ("assistant", "tiny")
    [block] = message.content
    assert block.type == "text" and block.text == ANSWER
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.input_tokens == len(ring.calls[0].prompt_ids) - 2
    assert message.usage.cache_read_input_tokens == 2
    assert message.usage.output_tokens == len(tokenizer.encode(ANSWER)) + 1


async def test_a_conversation_with_a_tool(tokenizer: Tokenizer) -> None:
    """Streamed and whole tell the same, and what they tell can be sent back."""
    ring = ring_of(tokenizer, lambda prompt: ANSWER if "<|start|>tool" in prompt else f"Let me see.\n{CALL}")
    turns: list = [{"role": "user", "content": "How warm?"}]  # type: ignore[type-arg]
    async with serving(ring, tokenizer) as url, client_of(url) as client:
        fields = {"model": "tiny", "max_tokens": 200, "tools": [WEATHER]}
        whole = await client.messages.create(messages=turns, **fields)  # type: ignore[call-overload]
        async with client.messages.stream(messages=turns, **fields) as stream:  # type: ignore[arg-type]
            streamed = await stream.get_final_message()
        for message in (whole, streamed):
            text, call = message.content
            assert message.stop_reason == "tool_use" and text.text.strip() == "Let me see."
            assert (call.name, call.input) == ("get_weather", {"city": "Ulm"})
        turns.append({"role": "assistant", "content": [b.model_dump() for b in whole.content]})
        result = {"type": "tool_result", "tool_use_id": whole.content[1].id, "content": "9"}
        turns.append({"role": "user", "content": [result, {"type": "text", "text": "So?"}]})
        last = await client.messages.create(messages=turns, **fields)  # type: ignore[call-overload]
    assert last.content[0].text == ANSWER and last.stop_reason == "end_turn"
    prompt = prompt_of(tokenizer, ring)
    assert f"{CALL}<|end|>\n<|start|>tool get_weather\n9<|end|>\n<|start|>user\nSo?<|end|>" in prompt


@pytest.mark.parametrize("per_chunk", [1, 3, 1000])
async def test_the_events_of_a_stream(tokenizer: Tokenizer, per_chunk: int) -> None:
    ring = ring_of(tokenizer, f"<think>hm, é</think>{ANSWER}\n{CALL}", per_chunk)
    async with serving(ring, tokenizer) as url:
        events = await events_of(url, tools=[WEATHER], max_tokens=300)
    start, stop = events[0]["message"], events[-2]
    assert start["content"] == [] and start["stop_reason"] is None and start["usage"]["output_tokens"] == 0
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    assert stop["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    kinds: list[str] = []
    told, opened = ["", "", ""], -1
    for event in events[2:-2]:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(kinds)
                opened = event["index"]
                kinds.append(event["content_block"]["type"])
            case "content_block_delta":
                assert event["index"] == opened
                delta = event["delta"]
                told[opened] += delta.get("thinking") or delta.get("text") or delta.get("partial_json") or ""
            case "content_block_stop":
                assert event["index"] == opened
                opened = -1
    assert kinds == ["thinking", "text", "tool_use"]
    assert told[0] == "hm, é" and told[1].strip() == ANSWER and json.loads(told[2]) == {"city": "Ulm"}


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({"max_tokens": 3}, "max_tokens", None),
        ({"stop_sequences": ["has"]}, "stop_sequence", "has"),
        ({}, "end_turn", None),
    ],
)
async def test_why_it_stopped(
    tokenizer: Tokenizer, fields: dict[str, object], reason: str, sequence: str | None
) -> None:
    async with (
        serving(ring_of(tokenizer, ANSWER), tokenizer) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        whole = (await client.post("/v1/messages", json={**ASK, **fields})).json()
        events = await events_of(url, **fields)
    expected = {"stop_reason": reason, "stop_sequence": sequence}
    assert {name: whole[name] for name in expected} == expected == events[-2]["delta"]
    assert whole["usage"] == events[-2]["usage"]


async def test_thinking_is_turned_on_and_off(tmp_path: Path) -> None:
    """Without a word there is none, as Anthropic has it."""
    tokenizer = byte_level_tokenizer(tmp_path, template=SWITCHED)
    ring = ring_of(tokenizer, lambda prompt: "hm</think>Yes." if prompt.endswith("<think>\n") else "Yes.")
    on = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000}
    async with serving(ring, tokenizer) as url, httpx.AsyncClient(base_url=url) as client:
        for fields, kinds in (
            (on, ["thinking", "text"]),
            ({"thinking": {"type": "adaptive"}}, ["thinking", "text"]),
            ({"thinking": {"type": "disabled"}}, ["text"]),
            ({}, ["text"]),
        ):
            answer = (await client.post("/v1/messages", json={**ASK, **fields})).json()
            assert [block["type"] for block in answer["content"]] == kinds
    assert answer["content"][0]["text"] == "Yes."


async def test_thinking_that_cannot_be_turned(tokenizer: Tokenizer) -> None:
    ring = ring_of(tokenizer, ANSWER)
    settings = ApiSettings(reasoning_parser="none")
    body = {**ASK, "max_tokens": 2000, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    adaptive = {**ASK, "thinking": {"type": "adaptive"}}
    async with serving(ring, tokenizer, settings) as url, httpx.AsyncClient(base_url=url) as client:
        refused = await client.post("/v1/messages", json=body)
        as_it_likes = await client.post("/v1/messages", json=adaptive)
    assert refused.status_code == 400 and "--reasoning-parser" in refused.json()["error"]["message"]
    assert as_it_likes.status_code == 200, "a model that cannot reason has chosen not to"


async def test_thinking_goes_back_to_the_template(tokenizer: Tokenizer) -> None:
    ring = ring_of(tokenizer, ANSWER)
    blocks = [{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "Yes."}]
    turns = [ASK["messages"][0], {"role": "assistant", "content": blocks}, ASK["messages"][0]]
    async with serving(ring, tokenizer) as url, httpx.AsyncClient(base_url=url) as client:
        await client.post("/v1/messages", json={**ASK, "messages": turns})
    assert "<think>hm</think>Yes." in prompt_of(tokenizer, ring)


async def test_a_schema_is_followed(tokenizer: Tokenizer) -> None:
    ring = ring_of(tokenizer, "{}")
    form = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    async with serving(ring, tokenizer) as url, httpx.AsyncClient(base_url=url) as client:
        response = await client.post("/v1/messages", json={**ASK, "output_config": form})
    assert response.status_code == 200
    output = ring.calls[0].params.structured_output
    assert output is not None and json.loads(output.text) == {"type": "object"}


async def test_what_claude_code_sends(tokenizer: Tokenizer) -> None:
    """Wishes that no server has to grant, and what asks for nothing."""
    ring = ring_of(tokenizer, ANSWER)
    long_name = "mcp__" + "x" * 123
    async with serving(ring, tokenizer) as url, client_of(url) as client:
        message = await client.messages.create(
            model="tiny",
            max_tokens=100,
            system="Be brief.",
            messages=[
                {"role": "user", "content": "x"},
                {
                    "role": "assistant",
                    "content": [{"type": "redacted_thinking", "data": "?"}, {"type": "text", "text": "y"}],
                },
                {"role": "system", "content": [{"type": "text", "text": "Hurry."}]},
                {"role": "user", "content": "z"},
            ],
            tools=[{"name": long_name, "input_schema": {"type": "object"}}],
            thinking={"type": "adaptive"},
            output_config={"effort": "high"},
            cache_control={"type": "ephemeral"},
            extra_body={
                "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
            },
        )
    assert message.content[0].type == "text" and message._request_id
    shown = prompt_of(tokenizer, ring)
    assert long_name in shown
    assert "<|start|>assistant\ny<|end|>\n<|start|>system\nHurry.<|end|>\n<|start|>user\nz" in shown


async def test_an_effort_goes_to_a_template_that_knows_grades(tmp_path: Path) -> None:
    graded = SWITCHED.replace("<|start|>assistant\n{% if", "<|start|>assistant {{ reasoning_effort }}\n{% if")
    assert graded != SWITCHED
    tokenizer = byte_level_tokenizer(tmp_path, template=graded)
    ring = ring_of(tokenizer, ANSWER)
    async with serving(ring, tokenizer) as url, httpx.AsyncClient(base_url=url) as client:
        body = {**ASK, "thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}
        assert (await client.post("/v1/messages", json=body)).status_code == 200
        assert prompt_of(tokenizer, ring).endswith("<|start|>assistant max\n<think>\n")
        chat = {"messages": [{"role": "user", "content": "x"}], "reasoning_effort": "low"}
        assert (await client.post("/v1/chat/completions", json=chat)).status_code == 200
        assert prompt_of(tokenizer, ring).endswith("<|start|>assistant low\n<think>\n")
        none = await client.post("/v1/chat/completions", json={**chat, "reasoning_effort": "none"})
        assert none.status_code == 200 and not prompt_of(tokenizer, ring).endswith("<think>\n")
        own = {**chat, "chat_template_kwargs": {"reasoning_effort": "my own"}}
        assert (await client.post("/v1/chat/completions", json=own)).status_code == 200
        assert prompt_of(tokenizer, ring).endswith("<|start|>assistant my own\n<think>\n")
        wrong = await client.post("/v1/chat/completions", json={**chat, "reasoning_effort": "huge"})
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "reasoning_effort"


async def test_counting(tokenizer: Tokenizer) -> None:
    ring = ring_of(tokenizer, ANSWER)
    turns = [{"role": "user", "content": "How warm is it? " * 2000}]
    async with serving(ring, tokenizer) as url, client_of(url) as client:
        short = await client.messages.count_tokens(
            model="tiny",
            system="Be brief.",
            messages=[{"role": "user", "content": "x"}],
            tools=[WEATHER],  # type: ignore[list-item]
        )
        await client.messages.create(  # type: ignore[call-overload]
            **ASK, model="tiny", system="Be brief.", tools=[WEATHER]
        )
        longer = await client.messages.count_tokens(model="tiny", messages=turns)  # type: ignore[arg-type]
    assert short.input_tokens == len(ring.calls[0].prompt_ids)
    assert longer.input_tokens > 4096 and len(ring.calls) == 1


@pytest.mark.parametrize(
    ("error", "status", "type_", "again"),
    [
        (busy(), 529, "overloaded_error", "true"),
        (RingError(504, "deadline_exceeded", "late"), 504, "timeout_error", "false"),
        (RingError(502, "incomplete_answer", "cut"), 502, "api_error", "true"),
        (RuntimeError("a bug"), 500, "api_error", "false"),
    ],
)
async def test_errors_of_the_ring(
    tokenizer: Tokenizer, error: Exception, status: int, type_: str, again: str
) -> None:
    ring = ring_of(tokenizer, ANSWER)
    ring.error = error
    async with serving(ring, tokenizer) as url, httpx.AsyncClient(base_url=url) as client:
        for stream in (False, True):
            response = await client.post("/v1/messages", json={**ASK, "stream": stream})
            assert response.status_code == status and response.headers["x-should-retry"] == again
            body = response.json()
            assert body["type"] == "error" and body["error"]["type"] == type_
            assert body["request_id"] == response.headers["x-request-id"]
        ring.fail_after = 2
        events = await events_of(url)
    assert events[-1]["type"] == "error" and events[-1]["error"]["type"] == type_


async def test_limits(tokenizer: Tokenizer) -> None:
    metrics = RouterMetrics(CollectorRegistry())
    tenant = Tenant("acme", Limits(requests_per_minute=1))
    service = CompletionService(ring_of(tokenizer, ANSWER), tokenizer, ApiSettings(), metrics, tenant=tenant)
    async with serving_app(app_for(service)) as url, client_of(url) as client:
        ask = {**ASK, "model": "tiny"}
        await client.messages.create(**ask)  # type: ignore[call-overload]
        with pytest.raises(anthropic.RateLimitError) as refused:
            await client.messages.create(**ask)  # type: ignore[call-overload]
    assert refused.value.body["error"]["type"] == "rate_limit_error"
    headers = refused.value.response.headers
    assert headers["x-should-retry"] == "true" and int(headers["retry-after"]) >= 1


async def test_anthropics_client_raises_its_own_errors(tokenizer: Tokenizer) -> None:
    async with serving(ring_of(tokenizer, ANSWER), tokenizer) as url, client_of(url) as client:
        with pytest.raises(anthropic.NotFoundError, match="does not exist"):
            await client.messages.create(model="other", **ASK)  # type: ignore[call-overload]
        with pytest.raises(anthropic.BadRequestError, match="max_tokens must be at least 1"):
            await client.messages.create(model="tiny", **{**ASK, "max_tokens": 0})  # type: ignore[call-overload]
        async with httpx.AsyncClient(base_url=url) as plain:
            wrong = await plain.get("/v1/messages")
            absent = await plain.get("/v1/messages/nothing")
    assert wrong.status_code == 405 and wrong.json()["error"]["type"] == "invalid_request_error"
    assert absent.status_code == 404 and absent.json()["error"]["type"] == "not_found_error"


@pytest.fixture
async def api(tokenizer: Tokenizer) -> AsyncIterator[httpx.AsyncClient]:
    ring: FakeRing = ring_of(tokenizer, ANSWER)
    async with serving(ring, tokenizer) as url, httpx.AsyncClient(base_url=url) as client:
        yield client


def turns(*blocks: dict[str, object], role: str = "user") -> dict[str, object]:
    return {"messages": [{"role": role, "content": list(blocks)}, {"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages is empty"),
        (
            {"messages": [{"role": "tool", "content": "x"}]},
            "messages[0].role must be user, assistant or system",
        ),
        (turns({"type": "image"}, role="system"), "messages[0].content[0].type must be text"),
        ({"messages": [{"role": "assistant", "content": "x "}]}, "messages[0].content ends with white space"),
        (turns({"type": "image"}), "messages[0].content[0].type must be text or tool_result"),
        (turns({"type": "text"}), "messages[0].content[0].text is required"),
        (turns({"type": "tool_result"}), "messages[0].content[0].tool_use_id is required"),
        (
            turns({"type": "tool_use", "name": "f"}, role="assistant"),
            "messages[0].content[0].input is required",
        ),
        ({"system": [{"type": "image"}]}, "system[0].type must be text"),
        ({"temperature": 1.5}, "between 0 and 1"),
        ({"top_k": -7}, "top_k must be"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema is required"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "runs no tools"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name must be"),
        ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools[0].input_schema must be"),
        ({"tool_choice": {"type": "all"}}, "tool_choice.type must be auto"),
        ({"tool_choice": {"type": "any"}}, "only allowed with tools"),
        ({"thinking": {"type": "perhaps"}}, "thinking.type must be"),
        ({"thinking": {"type": "disabled"}}, "cannot turn it off"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens is required"),
        ({"thinking": {"type": "enabled", "budget_tokens": 100}}, "at least 1024"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort must be one of low"),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            "context_management.edits[0].keep must be",
        ),
        ({"tools": [{"name": "f" * 129, "input_schema": {}}]}, "tools[0].name must be 1 to 128"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema is required"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is not supported"),
        ({"modell": "x"}, "Did you mean model"),
    ],
)
async def test_what_is_refused(api: httpx.AsyncClient, fields: dict[str, object], said: str) -> None:
    response = await api.post("/v1/messages", json={**ASK, **fields})
    body = response.json()
    assert response.status_code == 400 and body["type"] == "error", body
    assert body["error"]["type"] == "invalid_request_error" and said in body["error"]["message"], body
