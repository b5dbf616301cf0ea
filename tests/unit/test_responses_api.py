"""``/v1/responses`` as OpenAI's own client sees it, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import openai
import pytest

from baton.router.api.settings import ApiSettings
from baton.text.tokenizer import Tokenizer
from tests.support.api_server import serving
from tests.support.fake_ring import FakeRing, busy
from tests.support.scripted_ring import prompt_of, ring_of
from tests.support.tiny_tokenizers import TOOL_TEMPLATE, byte_level_tokenizer

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
ANSWER = "Ulm has 9 °C."
SWITCHED = TOOL_TEMPLATE.replace("if opens", "if enable_thinking")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level_tokenizer(tmp_path_factory.mktemp("model"), template=TOOL_TEMPLATE)


def client_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


async def events_of(url: str, **fields: object) -> list[dict]:  # type: ignore[type-arg]
    """Every event of a stream, checked for what all streams have in common."""
    found = []
    async with (
        httpx.AsyncClient(base_url=url, timeout=30) as client,
        client.stream("POST", "/v1/responses", json={"stream": True, **fields}) as response,
    ):
        assert response.status_code == 200, await response.aread()
        kind = ""
        async for line in response.aiter_lines():
            if line.startswith("event: "):
                kind = line.removeprefix("event: ")
            elif line:
                event = json.loads(line.removeprefix("data: "))
                assert event["type"] == kind
                found.append(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert [event["type"] for event in found[:2]] == ["response.created", "response.in_progress"]
    return found


async def test_a_text(tokenizer: Tokenizer) -> None:
    ring = ring_of(tokenizer, ANSWER)
    ring.cached_tokens = 2
    async with serving(ring, tokenizer) as url, client_of(url) as client:
        response = await client.responses.create(
            model="tiny", input="How warm?", instructions="Be brief.", metadata={"a": "b"}, store=False
        )
    assert prompt_of(tokenizer, ring) == (
        "<|start|>system\nBe brief.<|end|>\n<|start|>user\nHow warm?<|end|>\n<|start|>assistant\n"
    )
    assert (response.status, response.output_text, response.model) == ("completed", ANSWER, "tiny")
    assert response.id.startswith("resp_") and response.metadata == {"a": "b"}
    [item] = response.output
    assert item.type == "message" and item.id.startswith("msg_") and item.status == "completed"
    assert response.usage is not None
    assert response.usage.input_tokens == len(ring.calls[0].prompt_ids)
    assert response.usage.input_tokens_details.cached_tokens == 2
    assert response.usage.output_tokens == len(tokenizer.encode(ANSWER)) + 1
    assert response.usage.output_tokens_details.reasoning_tokens == 0


async def test_a_conversation_with_a_tool(tokenizer: Tokenizer) -> None:
    """Streamed and whole tell the same, and what they tell can be sent back."""
    ring = ring_of(tokenizer, lambda prompt: ANSWER if "<|start|>tool" in prompt else f"Let me see.\n{CALL}")
    async with serving(ring, tokenizer) as url, client_of(url) as client:
        items: list = [{"role": "user", "content": [{"type": "input_text", "text": "How warm?"}]}]  # type: ignore[type-arg]
        whole = await client.responses.create(model="tiny", input=items, tools=[WEATHER])  # type: ignore[list-item]
        async with client.responses.stream(model="tiny", input=items, tools=[WEATHER]) as stream:  # type: ignore[list-item]
            kinds = [event.type async for event in stream]
            streamed = await stream.get_final_response()
        assert [item.type for item in whole.output] == ["message", "function_call"]
        assert [item.type for item in streamed.output] == ["message", "function_call"]
        text, call = streamed.output
        assert text.type == "message" and call.type == "function_call"
        assert text.content[0].text == whole.output_text == "Let me see."
        assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Ulm"})
        assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 2
        assert "response.function_call_arguments.delta" in kinds and kinds[-1] == "response.completed"
        items += [item.model_dump(exclude_none=True) for item in whole.output]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "9"})
        items[-1]["call_id"] = whole.output[1].call_id
        last = await client.responses.create(model="tiny", input=items, tools=[WEATHER])  # type: ignore[list-item]
    assert last.output_text == ANSWER
    prompt = prompt_of(tokenizer, ring)
    assert f"<|start|>assistant\nLet me see.{CALL}<|end|>\n<|start|>tool get_weather\n9<|end|>" in prompt


@pytest.mark.parametrize("per_chunk", [1, 3, 1000])
async def test_the_events_of_a_stream(tokenizer: Tokenizer, per_chunk: int) -> None:
    ring = ring_of(tokenizer, f"<think>hm, é</think>{ANSWER}\n{CALL}", per_chunk)
    async with serving(ring, tokenizer) as url:
        events = await events_of(url, input="x", tools=[WEATHER])
        async with client_of(url) as client:
            whole = await client.responses.create(model="tiny", input="x", tools=[WEATHER])  # type: ignore[list-item]
    told = {"reasoning_text": "", "output_text": "", "function_call_arguments": ""}
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind.endswith(".delta"):
            told[kind.removesuffix(".delta")] += event["delta"]
        elif kind in ("reasoning_text.done", "output_text.done"):
            assert told[kind.removesuffix(".done")] == event["text"]
        elif kind == "function_call_arguments.done":
            assert told["function_call_arguments"] == event["arguments"]
    assert told["reasoning_text"] == "hm, é" and told["output_text"].strip() == ANSWER
    last = events[-1]
    assert last["type"] == "response.completed"
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == last["response"]["output"]
    kinds = ["reasoning", "message", "function_call"]
    assert [item["type"] for item in done] == [item.type for item in whole.output] == kinds
    assert all(item["status"] == "completed" for item in done)
    details = last["response"]["usage"]["output_tokens_details"]
    assert (per_chunk < 1000) <= details["reasoning_tokens"] < last["response"]["usage"]["output_tokens"]


async def test_an_answer_that_is_cut_short(tokenizer: Tokenizer) -> None:
    async with serving(ring_of(tokenizer, ANSWER), tokenizer) as url:
        events = await events_of(url, input="x", max_output_tokens=4)
    response = events[-1]["response"]
    assert events[-1]["type"] == "response.incomplete" and response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    [item] = response["output"]
    assert item["status"] == "incomplete" and ANSWER.startswith(item["content"][0]["text"])


async def test_an_answer_that_fails(tokenizer: Tokenizer) -> None:
    ring = ring_of(tokenizer, ANSWER)
    ring.error, ring.fail_after = busy(), 3
    async with serving(ring, tokenizer) as url:
        events = await events_of(url, input="x")
        assert events[-1]["type"] == "response.failed"
        assert events[-1]["response"]["error"]["code"] == "server_error"
        ring.fail_after = 0
        async with httpx.AsyncClient(base_url=url) as client:
            response = await client.post("/v1/responses", json={"input": "x", "stream": True})
    assert response.status_code == 503 and response.headers["x-should-retry"] == "true"
    assert response.json()["error"]["code"] == "no_capacity"


async def test_log_probabilities_go_with_the_text(tokenizer: Tokenizer) -> None:
    fields = {"input": "x", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    async with serving(ring_of(tokenizer, ANSWER), tokenizer) as url:
        events = await events_of(url, **fields)
        async with httpx.AsyncClient(base_url=url) as client:
            whole = (await client.post("/v1/responses", json=fields)).json()
    told = [one for event in events if event["type"].endswith("text.delta") for one in event["logprobs"]]
    final = events[-1]["response"]["output"][0]["content"][0]["logprobs"]
    assert whole["output"][0]["content"][0]["logprobs"] == final
    assert final[: len(told)] == told and len(told) >= len(tokenizer.encode(ANSWER)) - 1
    assert "".join(one["token"] for one in told).startswith("Ulm") and len(told[0]["top_logprobs"]) == 2


async def test_a_schema_is_followed(tokenizer: Tokenizer) -> None:
    ring = ring_of(tokenizer, "{}")
    schema = {"type": "object", "additionalProperties": False}
    async with serving(ring, tokenizer) as url, client_of(url) as client:
        response = await client.responses.create(
            model="tiny",
            input="x",
            text={"format": {"type": "json_schema", "name": "a", "schema": schema, "strict": True}},
        )
    assert response.text is not None and response.text.format is not None
    assert response.text.format.model_dump(by_alias=True, exclude_none=True)["schema"] == schema
    output = ring.calls[0].params.structured_output
    assert output is not None and output.kind == "json_schema" and json.loads(output.text) == schema


async def test_reasoning_is_turned_on_and_off(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer(tmp_path, template=SWITCHED)
    ring = ring_of(tokenizer, lambda prompt: "hm</think>Yes." if prompt.endswith("<think>\n") else "Yes.")
    async with serving(ring, tokenizer) as url, client_of(url) as client:
        on = await client.responses.create(model="tiny", input="x", reasoning={"effort": "medium"})
        off = await client.responses.create(model="tiny", input="x", reasoning={"effort": "none"})
        high = await client.responses.with_raw_response.create(
            model="tiny", input="x", reasoning={"effort": "high"}
        )
    assert high.headers["x-baton-ignored-fields"] == "reasoning.effort", "the template knows no grades"
    assert [item.type for item in high.parse().output] == ["reasoning", "message"]
    assert [item.type for item in on.output] == ["reasoning", "message"]
    assert [item.type for item in off.output] == ["message"]
    assert on.output_text == off.output_text == "Yes."


async def test_what_was_no_call_is_text(tokenizer: Tokenizer) -> None:
    broken = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm"'
    ring = ring_of(tokenizer, f"So: {broken}")
    async with serving(ring, tokenizer) as url:
        events = await events_of(url, input="x", tools=[WEATHER])
        async with client_of(url) as client:
            whole = await client.responses.create(model="tiny", input="x", tools=[WEATHER])  # type: ignore[list-item]
    assert whole.output_text == f"So: {broken}" and whole.status == "completed"
    text, call = events[-1]["response"]["output"]
    assert call["type"] == "function_call" and call["status"] == "incomplete"
    assert text["status"] == "completed"


@pytest.fixture
async def api(tokenizer: Tokenizer) -> AsyncIterator[httpx.AsyncClient]:
    ring = ring_of(tokenizer, ANSWER)
    async with serving(ring, tokenizer) as url, httpx.AsyncClient(base_url=url) as client:
        yield client


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "keeps no responses"),
        ({"store": True}, "store", "keeps no responses"),
        ({"background": True}, "background", "keeps no responses"),
        ({"conversation": "c"}, "conversation", "keeps no responses"),
        ({"truncation": "auto"}, "truncation", "never drops"),
        ({"include": ["file_search_call.results"]}, "include[0]", "message.output_text.logprobs"),
        ({"input": []}, "input", "input is empty"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "stored item"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role", "input[0].role must be one of"),
        ({"input": [{"role": "user"}]}, "input[0].content", "is required"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
            "only text",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "["}]},
            "input[0].arguments",
            "JSON object",
        ),
        ({"instructions": "i", "input": [{"role": "user", "content": None}]}, "input[0].content", "required"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must be at least 1"),
        ({"temperature": 9}, "temperature", "between 0 and 2"),
        ({"top_logprobs": 2}, "top_logprobs", "only allowed when include has"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "runs no tools"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "1 to 64"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "only allowed with tools"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "json_schema"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "is required"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "medium"),
        ({"reasoning": {"effort": "some"}}, "reasoning.effort", "none, minimal"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "auto"),
        ({"stream_options": {}}, "stream_options", "stream is true"),
        ({"modell": "x"}, "modell", "Did you mean model"),
    ],
)
async def test_what_is_refused(
    api: httpx.AsyncClient, fields: dict[str, object], param: str, said: str
) -> None:
    response = await api.post("/v1/responses", json={"input": "x", **fields})
    error = response.json()["error"]
    assert response.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["param"] == param and said in error["message"], error
    assert response.headers["x-should-retry"] == "false"


async def test_reasoning_needs_a_parser(tokenizer: Tokenizer) -> None:
    settings = ApiSettings(reasoning_parser="none")
    async with (
        serving(ring_of(tokenizer, ANSWER), tokenizer, settings) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        wished = await client.post("/v1/responses", json={"input": "x", "reasoning": {"effort": "low"}})
        taken = await client.post("/v1/responses", json={"input": "x", "reasoning": {"effort": "none"}})
    assert wished.status_code == taken.status_code == 200
    assert wished.headers["x-baton-ignored-fields"] == "reasoning.effort"
    assert "x-baton-ignored-fields" not in taken.headers


async def test_a_client_that_leaves_is_noticed(tokenizer: Tokenizer) -> None:
    ring: FakeRing = ring_of(tokenizer, ANSWER * 20)
    ring.delay = 0.01
    async with (
        serving(ring, tokenizer) as url,
        httpx.AsyncClient(base_url=url) as client,
        client.stream("POST", "/v1/responses", json={"input": "x", "stream": True}) as response,
    ):
        async for _ in response.aiter_lines():
            break
    assert [call.closed for call in ring.calls] == [True]
