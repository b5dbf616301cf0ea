"""Markers that are added tokens, as in the tokenizers of Qwen2.5 and Qwen3, through the ring: calls that must
be made, forms behind reasoning, and forms that hold a marker's text."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from baton.text.tokenizer import Tokenizer
from tests.support.qwen_tokenizer import save_qwen_model
from tests.support.ring import Ring, running_ring

pytestmark = pytest.mark.beside

Body = dict[str, Any]

CITIES: Body = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Ulm", "Bonn"]}},
    "required": ["city"],
    "additionalProperties": False,
}
USER = {"role": "user", "content": "Hello"}
FUNCTION: Body = {"name": "get_weather", "parameters": CITIES}
TIGHT: Body = {**CITIES, "x-guidance": {"whitespace_flexible": False}}
FORM: Body = {"response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema": TIGHT}}}
NO_THOUGHT: Body = {"chat_template_kwargs": {"enable_thinking": False}}


@dataclass
class QwenRing:
    ring: Ring
    tokenizer: Tokenizer
    client: httpx.AsyncClient

    def token(self, text: str) -> int:
        [token] = self.tokenizer.encode(text)
        return token

    async def post(self, path: str, **fields: object) -> Body:
        response = await self.client.post(f"/v1/{path}", json={"model": "m", "temperature": 0, **fields})
        assert response.status_code == 200, response.text
        body: Body = response.json()
        return body

    async def events(self, path: str, **fields: object) -> list[Body]:
        body = {"model": "m", "temperature": 0, "stream": True, **fields}
        async with self.client.stream("POST", f"/v1/{path}", json=body) as response:
            assert response.status_code == 200, await response.aread()
            lines = [line.removeprefix("data: ") async for line in response.aiter_lines()]
        return [json.loads(line) for line in lines if line.startswith("{")]

    async def chat(self, *, stream: bool, **fields: object) -> tuple[str, Body]:
        """The finish reason and the message of a chat."""
        asked: Body = {"messages": [USER], "max_tokens": 80, **fields}
        if not stream:
            [choice] = (await self.post("chat/completions", **asked))["choices"]
            return choice["finish_reason"], choice["message"]
        message: Body = {"content": "", "reasoning_content": "", "tool_calls": []}
        reason = ""
        for event in await self.events("chat/completions", **asked):
            [choice] = event["choices"]
            reason = choice["finish_reason"] or reason
            for name in ("content", "reasoning_content"):
                message[name] += choice["delta"].get(name) or ""
            for call in choice["delta"].get("tool_calls") or []:
                if "id" in call:
                    message["tool_calls"].append(call)
                else:
                    message["tool_calls"][-1]["function"]["arguments"] += call["function"]["arguments"]
        return reason, message


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Ring, Tokenizer]]:
    tmp = tmp_path_factory.mktemp("qwen-ring")
    tokenizer = save_qwen_model(tmp / "model")
    with running_ring(tmp, model=str(tmp / "model"), router_options=["--served-model-name", "m"]) as ring:
        yield ring, tokenizer


@pytest.fixture
async def qwen(running: tuple[Ring, Tokenizer]) -> AsyncIterator[QwenRing]:
    ring, tokenizer = running
    async with httpx.AsyncClient(base_url=ring.url, timeout=60) as client:
        yield QwenRing(ring, tokenizer, client)
    ring.wait_idle()


def check(call: Body) -> None:
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"])["city"] in ("Ulm", "Bonn")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
async def test_a_chat_makes_the_call_that_it_must(qwen: QwenRing, choice: object, stream: bool) -> None:
    tools = [{"type": "function", "function": FUNCTION}]
    for fields in (
        NO_THOUGHT,
        {"logit_bias": {qwen.token("<think>"): -100}},
        {"logit_bias": {qwen.token("<think>"): 100, qwen.token("</think>"): 100}},
    ):
        reason, message = await qwen.chat(stream=stream, tools=tools, tool_choice=choice, **fields)
        assert reason == "tool_calls" and not message["content"]
        for call in message["tool_calls"]:
            check(call)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
async def test_a_response_makes_the_call_that_it_must(qwen: QwenRing, choice: object) -> None:
    asked: Body = {
        "input": "Hello",
        "max_output_tokens": 80,
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "reasoning": {"effort": "none"},
    }
    whole = await qwen.post("responses", **asked)
    *_, last = await qwen.events("responses", **asked)
    assert last["type"] == "response.completed"
    for response in (whole, last["response"]):
        [item] = response["output"]
        assert item["type"] == "function_call" and item["name"] == "get_weather"
        assert json.loads(item["arguments"])["city"] in ("Ulm", "Bonn")


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
async def test_a_message_makes_the_call_that_it_must(qwen: QwenRing, choice: Body) -> None:
    asked: Body = {
        "messages": [USER],
        "max_tokens": 80,
        "tools": [{"name": "get_weather", "input_schema": CITIES}],
        "tool_choice": {**choice, "disable_parallel_tool_use": True},
    }
    whole = await qwen.post("messages", **asked)
    assert whole["stop_reason"] == "tool_use"
    [block] = whole["content"]
    assert block["input"]["city"] in ("Ulm", "Bonn")
    events = await qwen.events("messages", **asked)
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert json.loads("".join(delta["partial_json"] for delta in deltas)) == block["input"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_form_follows_the_reasoning(qwen: QwenRing, stream: bool) -> None:
    """The end of the reasoning is the token, which may come at once."""
    begins, ends = qwen.token("<think>"), qwen.token("</think>")
    reason, message = await qwen.chat(stream=stream, **FORM, logit_bias={begins: 100, ends: 100})
    assert reason == "stop" and json.loads(message["content"])["city"] in ("Ulm", "Bonn")
    reason, message = await qwen.chat(stream=stream, **FORM, logit_bias={begins: 100, ends: -100})
    assert reason == "length" and message["reasoning_content"] and not message["content"]


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_may_come_instead_of_a_form(qwen: QwenRing, stream: bool) -> None:
    asked: Body = {"tools": [{"type": "function", "function": FUNCTION}], **FORM, **NO_THOUGHT}
    calls = qwen.token("<tool_call>")
    reason, message = await qwen.chat(stream=stream, **asked, logit_bias={calls: 100})
    assert reason == "tool_calls" and not message["content"]
    for call in message["tool_calls"]:
        check(call)
    reason, message = await qwen.chat(stream=stream, **asked, logit_bias={calls: -100})
    assert reason == "stop" and not message.get("tool_calls")
    assert json.loads(message["content"])["city"] in ("Ulm", "Bonn")


TEXTS = [
    ({"choice": ["<think>"]}, "<think>"),
    ({"json": {"const": "a <think> b"}}, '"a <think> b"'),
    ({"regex": "x<tool_call>y"}, "x<tool_call>y"),
    ({"choice": ["a<|im_end|>b"]}, "a<|im_end|>b"),
    ({"grammar": 'start: "</think>" "<|im_start|>" /z<tool_call>/'}, "</think><|im_start|>z<tool_call>"),
]


@pytest.mark.parametrize(("form", "text"), TEXTS, ids=[text for _, text in TEXTS])
async def test_a_form_may_hold_the_text_of_a_token(qwen: QwenRing, form: Body, text: str) -> None:
    completion = await qwen.post("completions", prompt="Hello", max_tokens=40, structured_outputs=form)
    assert completion["choices"][0]["text"] == text
    for stream in (False, True):
        reason, message = await qwen.chat(stream=stream, structured_outputs=form, **NO_THOUGHT)
        assert (reason, message["content"]) == ("stop", text)
