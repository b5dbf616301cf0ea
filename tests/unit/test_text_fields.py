"""The fields of vLLM's that decide which text goes in and comes out, in each API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.core.sampling_params import ResolvedSampling
from baton.text.tokenizer import Tokenizer
from tests.support.api_server import serving
from tests.support.fake_ring import EOS, FakeRing
from tests.support.local_worker import LocalWorker, local_ring, until
from tests.support.scripted_ring import prompt_of, ring_of
from tests.support.tiny_tokenizers import TOOL_TEMPLATE, byte_level_tokenizer

USER = {"role": "user", "content": "hi"}
ANSWER = "the quick brown fox jumps"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level_tokenizer(tmp_path_factory.mktemp("model"), template=TOOL_TEMPLATE)


@pytest.fixture(params=[1, 3, 100], ids=lambda size: f"{size} at once")
def ring(tokenizer: Tokenizer, request: pytest.FixtureRequest) -> FakeRing:
    return ring_of(tokenizer, ANSWER, request.param)


@pytest.fixture
async def client(ring: FakeRing, tokenizer: Tokenizer) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(ring, tokenizer) as url, httpx.AsyncClient(base_url=url) as client:
        yield client


async def events(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = await client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


class TestStopStrings:
    async def test_are_left_in_an_answer(self, client: httpx.AsyncClient) -> None:
        asked = {"stop": ["ck br", "zebra"], "include_stop_str_in_output": True}
        text = {"prompt": "hi", "max_tokens": 50, **asked}
        chat = {"messages": [USER], **asked}
        [whole] = (await client.post(COMPLETIONS, json=text)).json()["choices"]
        assert (whole["text"], whole["finish_reason"], whole["stop_reason"]) == (
            "the quick br",
            "stop",
            "ck br",
        )
        streamed = "".join(event["choices"][0]["text"] for event in await events(client, COMPLETIONS, text))
        assert streamed == "the quick br"
        message = (await client.post(CHAT, json=chat)).json()["choices"][0]["message"]
        assert message["content"] == "the quick br"
        response = await client.post("/v1/responses", json={"input": "hi", **asked})
        assert response.json()["output"][0]["content"][0]["text"] == "the quick br"

    async def test_are_left_out_by_default(self, client: httpx.AsyncClient) -> None:
        text = {"prompt": "hi", "max_tokens": 50, "stop": ["ck br"]}
        for asked in (text, {**text, "include_stop_str_in_output": False}):
            [choice] = (await client.post(COMPLETIONS, json=asked)).json()["choices"]
            assert choice["text"] == "the qui"

    async def test_nothing_is_held_back_for_one(self, client: httpx.AsyncClient) -> None:
        """The end of the text may be the beginning of a stop string, which would stay in it anyway."""
        text = {"prompt": "hi", "max_tokens": 50, "stop": ["jumps over"], "include_stop_str_in_output": True}
        [choice] = (await client.post(COMPLETIONS, json=text)).json()["choices"]
        assert (choice["text"], choice["stop_reason"]) == (ANSWER, None)

    async def test_the_token_that_stops_is_text_too(self, client: httpx.AsyncClient) -> None:
        """As in vLLM: also the end of sequence, if special tokens are not left out."""
        text = {"prompt": "hi", "max_tokens": 50, "include_stop_str_in_output": True}
        for asked, expected in (
            (text, ANSWER),
            ({**text, "skip_special_tokens": False}, f"{ANSWER}<|end|>"),
            ({**text, "skip_special_tokens": False, "include_stop_str_in_output": False}, ANSWER),
        ):
            [choice] = (await client.post(COMPLETIONS, json=asked)).json()["choices"]
            assert (choice["text"], choice["finish_reason"]) == (expected, "stop")


class TestTokensAlone:
    async def test_of_a_completion(self, client: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
        text = {"prompt": "hi", "max_tokens": 50, "detokenize": False, "logprobs": 0}
        [choice] = (await client.post(COMPLETIONS, json=text)).json()["choices"]
        ids = [*tokenizer.encode(ANSWER), EOS]
        assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == ("", ids, "stop")
        assert len(choice["logprobs"]["token_logprobs"]) == len(ids)
        told = await events(client, COMPLETIONS, text)
        assert [id_ for event in told for id_ in event["choices"][0]["token_ids"]] == ids
        assert {event["choices"][0]["text"] for event in told} == {""}

    async def test_of_a_chat(self, client: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
        [choice] = (await client.post(CHAT, json={"messages": [USER], "detokenize": False})).json()["choices"]
        assert choice["message"] == {"role": "assistant", "content": "", "refusal": None}
        assert choice["token_ids"] == [*tokenizer.encode(ANSWER), EOS]

    async def test_a_stop_token_still_stops(self, client: httpx.AsyncClient, ring: FakeRing) -> None:
        body = {"prompt": "hi", "max_tokens": 9, "detokenize": False, "stop_token_ids": [7]}
        assert (await client.post(COMPLETIONS, json=body)).status_code == 200
        assert not ring.calls[0].params.detokenize
        assert ring.calls[0].params.stop_token_ids == frozenset({7})


class TestTruncation:
    @pytest.mark.parametrize("given", ["text", "ids"])
    async def test_keeps_the_end_or_the_beginning(
        self, client: httpx.AsyncClient, ring: FakeRing, tokenizer: Tokenizer, given: str
    ) -> None:
        ids = tokenizer.encode("the quick brown fox")
        body = {"prompt": "the quick brown fox" if given == "text" else ids, "truncate_prompt_tokens": 3}
        for side, kept in ((None, ids[-3:]), ("left", ids[-3:]), ("right", ids[:3])):
            response = await client.post(COMPLETIONS, json={**body, "truncation_side": side})
            assert response.json()["usage"]["prompt_tokens"] == 3
            assert ring.calls[-1].prompt_ids == kept

    async def test_leaves_a_shorter_prompt_alone(
        self, client: httpx.AsyncClient, ring: FakeRing, tokenizer: Tokenizer
    ) -> None:
        for tokens in (-1, 200):
            await client.post(COMPLETIONS, json={"prompt": "fox", "truncate_prompt_tokens": tokens})
            assert ring.calls[-1].prompt_ids == tokenizer.encode("fox")

    async def test_fills_the_context_but_one_token(
        self, client: httpx.AsyncClient, ring: FakeRing, tokenizer: Tokenizer
    ) -> None:
        assert ring.model is not None
        context = ring.model.max_model_len
        text = "fox zebra " * context
        body = {"prompt": text, "truncate_prompt_tokens": -1, "max_tokens": 16}
        response = await client.post(COMPLETIONS, json=body)
        assert response.json()["usage"]["prompt_tokens"] == context - 1
        assert response.json()["usage"]["completion_tokens"] == 1, "more is not refused, as in vLLM"
        assert ring.calls[-1].prompt_ids == tokenizer.encode(text)[1 - context :]
        chat = {"messages": [{"role": "user", "content": text}], "truncate_prompt_tokens": -1}
        assert (await client.post(CHAT, json=chat)).json()["usage"]["prompt_tokens"] == context - 1

    async def test_what_is_cut_off_is_not_echoed(self, client: httpx.AsyncClient) -> None:
        body = {"prompt": "the quick brown fox", "truncate_prompt_tokens": 2, "echo": True, "logprobs": 1}
        [choice] = (await client.post(COMPLETIONS, json={**body, "max_tokens": 3})).json()["choices"]
        logprobs = choice["logprobs"]
        assert len(logprobs["tokens"]) == 5
        kept = "".join(logprobs["tokens"][:2])
        assert choice["text"].startswith(kept) and "the quick brown fox".endswith(kept)
        assert logprobs["text_offset"][2] == len(kept)

    async def test_a_text_too_long_to_be_cut(self, client: httpx.AsyncClient) -> None:
        body = {"prompt": "é" * 600_000, "truncate_prompt_tokens": 5}
        error = (await client.post(COMPLETIONS, json=body)).json()["error"]
        assert error["param"] == "prompt" and "at most 524288 is cut" in error["message"]


class TestRequestIds:
    async def test_are_told(self, client: httpx.AsyncClient, ring: FakeRing) -> None:
        for path, body, told in (
            (COMPLETIONS, {"prompt": "a"}, "cmpl-mine.1"),
            (CHAT, {"messages": [USER]}, "chatcmpl-mine.1"),
            ("/v1/responses", {"input": "a"}, "mine.1"),
        ):
            response = await client.post(path, json={**body, "request_id": "mine.1"})
            assert response.json()["id"] == told
            assert response.headers["x-request-id"] == "mine.1"
            assert response.headers["x-baton-request-id"] in ring.calls[-1].request_id
            assert "mine" not in ring.calls[-1].request_id, "workers know requests by ids of the router's"
        chunks = await events(client, CHAT, {"messages": [USER], "request_id": "mine.1"})
        assert {chunk["id"] for chunk in chunks} == {"chatcmpl-mine.1"}

    async def test_a_header_names_the_request_too(self, client: httpx.AsyncClient) -> None:
        headers = {"x-request-id": "header"}
        body = {"prompt": "a", "request_id": "mine"}
        response = await client.post(COMPLETIONS, json=body, headers=headers)
        assert (response.json()["id"], response.headers["x-request-id"]) == ("cmpl-mine", "header")
        response = await client.post(COMPLETIONS, json={"prompt": "a"}, headers=headers)
        assert response.json()["id"] == f"cmpl-{response.headers['x-baton-request-id']}"

    async def test_the_same_twice_at_a_time_does_no_harm(self, ring: FakeRing, tokenizer: Tokenizer) -> None:
        ring.delay = 0.01
        async with serving(ring, tokenizer) as url, httpx.AsyncClient(base_url=url) as client:
            body = {"prompt": "a", "max_tokens": 50, "request_id": "mine"}
            answers = await asyncio.gather(*(client.post(COMPLETIONS, json=body) for _ in range(3)))
        assert [answer.json()["choices"][0]["text"] for answer in answers] == [ANSWER] * 3
        assert len({call.request_id for call in ring.calls}) == 3

    async def test_traces_have_them(self, client: httpx.AsyncClient) -> None:
        await client.post(COMPLETIONS, json={"prompt": "a", "request_id": "mine.2"})
        found = (await client.get("/debug/requests/mine.2")).json()
        assert found["client_request_id"] == "mine.2"


async def test_documents_are_the_templates(tmp_path: Path) -> None:
    template = (
        "{% for d in documents or [] %}[{{ d.title }}: {{ d.text }}]{% endfor %}{{ messages[0].content }}"
    )
    tokenizer = byte_level_tokenizer(tmp_path, template=template)
    ring = ring_of(tokenizer, ANSWER)
    async with serving(ring, tokenizer) as url, httpx.AsyncClient(base_url=url) as client:
        body = {"messages": [USER], "documents": [{"title": "t", "text": "x"}]}
        assert (await client.post(CHAT, json=body)).status_code == 200
    assert prompt_of(tokenizer, ring) == "[t: x]hi"


async def test_templates_see_tools_as_they_are(
    ring: FakeRing, tokenizer: Tokenizer, client: httpx.AsyncClient
) -> None:
    """Nothing is added where a client gives nothing: a function without parameters has none."""
    tools = [
        {"type": "function", "function": {"name": "bare"}},
        {"type": "function", "function": {"name": "empty", "parameters": {}}},
        {"type": "function", "function": {"name": "full", "description": "d", "strict": True}},
    ]
    shown = "\n".join(json.dumps(tool) for tool in tools)
    body = {"messages": [USER], "tools": tools}
    assert (await client.post(CHAT, json=body)).status_code == 200
    assert f"# Tools\n{shown}\nReturn calls" in prompt_of(tokenizer, ring)
    tokens = (await client.post("/tokenize", json=body)).json()["tokens"]
    assert tokens == ring.calls[-1].prompt_ids
    flat = [{"type": "function", "name": "bare"}]
    assert (await client.post("/v1/responses", json={"input": "hi", "tools": flat})).status_code == 200
    assert '{"type": "function", "function": {"name": "bare"}}\nReturn' in prompt_of(tokenizer, ring)


async def test_a_call_without_parameters_is_still_one(tokenizer: Tokenizer) -> None:
    ring = ring_of(tokenizer, '<tool_call>\n{"name": "bare", "arguments": {}}\n</tool_call>')
    async with serving(ring, tokenizer) as url, httpx.AsyncClient(base_url=url) as client:
        tools = [{"type": "function", "function": {"name": "bare"}}]
        body = {"messages": [USER], "tools": tools, "tool_choice": "required"}
        message = (await client.post(CHAT, json=body)).json()["choices"][0]["message"]
    assert message["tool_calls"][0]["function"] == {"name": "bare", "arguments": "{}"}
    grammar = ring.calls[0].params.structured_output
    assert grammar is not None and '"additionalProperties": false' in grammar.text


async def test_tools_to_tokenize_are_checked(client: httpx.AsyncClient) -> None:
    body = {"messages": [USER], "tools": [{"type": "function", "function": {"name": "a b"}}]}
    error = (await client.post("/tokenize", json=body)).json()["error"]
    assert error["param"] == "tools[0].function.name"


async def test_a_response_tells_its_messages(
    client: httpx.AsyncClient, tokenizer: Tokenizer, ring: FakeRing
) -> None:
    body = {"input": "hi", "enable_response_messages": True}
    response = (await client.post("/v1/responses", json=body)).json()
    prompt = ring.calls[-1].prompt_ids
    [given], [said] = response["input_messages"], response["output_messages"]
    assert given == {"type": "raw_message_tokens", "message": prompt_of(tokenizer, ring), "tokens": prompt}
    assert said == {
        "type": "raw_message_tokens",
        "message": ANSWER,
        "tokens": [*tokenizer.encode(ANSWER), EOS],
    }
    assert "input_messages" not in (await client.post("/v1/responses", json={"input": "hi"})).json()
    completed = (await events(client, "/v1/responses", body))[-1]["response"]
    assert completed["output_messages"] == [said]


SAMPLED = (
    *("top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("ignore_eos", "include_stop_str_in_output", "seed"),
)


async def test_a_response_samples_as_a_chat_does(client: httpx.AsyncClient, ring: FakeRing) -> None:
    fields = {
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "logit_bias": {"5": 1},
        "stop": "zebra",
        "stop_token_ids": [9],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "seed": 7,
        "structured_outputs": {"regex": ".*"},
    }
    assert (await client.post("/v1/responses", json={"input": "hi", **fields})).status_code == 200
    assert (await client.post(CHAT, json={"messages": [USER], **fields})).status_code == 200
    response, chat = (call.params for call in ring.calls)
    assert response == chat and response != ResolvedSampling(max_tokens=response.max_tokens, seed=7)
    assert [getattr(response, name) for name in SAMPLED] == [fields[name] for name in SAMPLED]


async def test_a_message_has_vllms_fields(
    client: httpx.AsyncClient, ring: FakeRing, tokenizer: Tokenizer
) -> None:
    body = {"messages": [USER], "chat_template_kwargs": {"opens": True}}
    response = await client.post("/v1/messages", json={**body, "max_tokens": 9, "cache_salt": "s"})
    assert response.status_code == 200, response.text
    assert prompt_of(tokenizer, ring).endswith("<think>\n")
    counted = await client.post("/v1/messages/count_tokens", json=body)
    assert counted.json()["input_tokens"] == len(ring.calls[-1].prompt_ids)
    salted = await client.post("/v1/messages", json={**body, "max_tokens": 9, "cache_salt": "s" * 300})
    assert salted.status_code == 400, "it is the salt of a chat"


@asynccontextmanager
async def in_front_of(
    workers: Sequence[LocalWorker], tokenizer: Tokenizer
) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        local_ring(workers) as ring,
        serving(ring, tokenizer) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        yield client


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("asked", [{"include_stop_str_in_output": True}, {"detokenize": False}])
async def test_a_lost_worker_changes_no_text(tokenizer: Tokenizer, asked: dict[str, Any]) -> None:
    body = {
        "prompt": [7, 3, 90, 14],
        "max_tokens": 40,
        "seed": 5,
        "temperature": 2,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    async with in_front_of([LocalWorker("both")], tokenizer) as client:
        [plain] = (await client.post(COMPLETIONS, json=body)).json()["choices"]
        if "detokenize" not in asked:
            asked = {**asked, "stop": plain["text"][-6:-2]}
        [alone] = (await client.post(COMPLETIONS, json={**body, **asked})).json()["choices"]
    workers = [LocalWorker("prefill"), *(LocalWorker("decode", step_s=0.01) for _ in range(2))]
    async with in_front_of(workers, tokenizer) as client:
        asking = asyncio.create_task(client.post(COMPLETIONS, json={**body, **asked}))
        await until(lambda: any(worker.engine.stats().generated_tokens > 5 for worker in workers[1:]))
        await max(workers[1:], key=lambda worker: worker.held).stop()
        [choice] = (await asking).json()["choices"]
    assert choice == alone
    if "stop" in asked:
        assert choice["text"].endswith(asked["stop"]) and choice["finish_reason"] == "stop"
