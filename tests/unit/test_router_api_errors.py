"""Every bad request gets its own 4xx in OpenAI's shape, and none of them reaches the ring."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator

import httpx
import psutil
import pytest

from baton.core.beam_search import BeamParams
from baton.router.api.settings import ApiSettings
from baton.text.tokenizer import Tokenizer
from tests.support.api_server import serving
from tests.support.deep import all_deep_but
from tests.support.fake_ring import FakeRing
from tests.support.tiny_tokenizers import byte_level_tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
BARE = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture
def ring() -> FakeRing:
    return FakeRing(lambda call: [10, 11, 12])


@pytest.fixture
async def client(ring: FakeRing, tokenizer: Tokenizer) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(ring, tokenizer) as url, httpx.AsyncClient(base_url=url, timeout=30) as client:
        yield client


def error_of(response: httpx.Response, status: int = 400) -> dict[str, str | None]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    error: dict[str, str | None] = body["error"]
    return error


BEAMS: dict[str, object] = {"use_beam_search": True}

BAD_FIELDS: list[tuple[dict[str, object], str, str]] = [
    # The fields, the param that is named, a part of the message.
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": []}, "prompt", "empty"),
    ({"prompt": [[]]}, "prompt", "empty"),
    ({"prompt": ["a", ""]}, "prompt[1]", "empty"),
    ({"prompt": [1, [2], 3]}, "prompt", "prompt[1] is [2]"),
    ({"prompt": ["a", 1]}, "prompt", "prompt[1] is 1"),
    ({"prompt": [1, True]}, "prompt[1]", "true"),
    ({"prompt": [1.5]}, "prompt[0]", "1.5"),
    ({"prompt": {"a": 1}}, "prompt", "object"),
    ({"prompt": None}, "prompt", "null"),
    ({"prompt": [401]}, "prompt", "prompt[0] is 401; token ids are 0 to 400"),
    ({"prompt": [5, -1]}, "prompt", "prompt[1] is -1"),
    ({"prompt": [[5], [10**30]]}, "prompt[1]", "prompt[1][0]"),
    ({"prompt": [5] * 256}, "prompt", "256 tokens, but the prompt has 256"),
    ({"prompt": "fox zebra " * 300}, "prompt", "context is 256 tokens"),
    ({"prompt": "a " * 1_000_000}, "prompt", "at least"),
    ({"max_tokens": 0}, "max_tokens", "at least 1, not 0"),
    ({"max_tokens": -5}, "max_tokens", "-5"),
    ({"max_tokens": 256}, "max_tokens", "max_tokens is 256, but this model's context is 256"),
    ({"max_tokens": 10**40}, "max_tokens", "at most 255"),
    ({"max_tokens": True}, "max_tokens", "bool"),
    ({"max_tokens": "five"}, "max_tokens", '"five"'),
    ({"max_tokens": "5.5"}, "max_tokens", '"5.5"'),
    ({"max_tokens": 5.5}, "max_tokens", "5.5"),
    ({"temperature": -1}, "temperature", "between 0 and 2, not -1"),
    ({"temperature": 2.1}, "temperature", "not 2.1"),
    ({"temperature": "hot"}, "temperature", '"hot"'),
    ({"temperature": True}, "temperature", "true"),
    ({"top_p": 0}, "top_p", "above 0 and at most 1"),
    ({"top_p": 1.01}, "top_p", "not 1.01"),
    ({"top_k": -2}, "top_k", "not -2"),
    ({"top_k": 10**12}, "top_k", "2147483647"),
    ({"min_p": 1.5}, "min_p", "between 0 and 1"),
    ({"min_p": -0.1}, "min_p", "between 0 and 1"),
    ({"seed": 2**64}, "seed", "64-bit"),
    ({"seed": -(2**63) - 1}, "seed", "64-bit"),
    ({"seed": 1.5}, "seed", "1.5"),
    ({"n": 0}, "n", "between 1 and 128, not 0"),
    ({"n": 10_000}, "n", "10000"),
    ({"n": -1}, "n", "-1"),
    ({"n": True}, "n", "true"),
    ({"n": 128, "prompt": ["a", "b", "c"]}, "n", "384 choices"),
    ({"prompt": ["a"] * 257}, "prompt", "257 prompts"),
    ({"stop": ["x"] * 1000}, "stop", "1000 strings; at most 16"),
    ({"stop": "x" * 1025}, "stop", "1025 characters"),
    ({"stop": ["a", ""]}, "stop", "stop[1] is empty"),
    ({"stop": ""}, "stop", "empty"),
    ({"stop": ["a", 5]}, "stop[1]", "5"),
    ({"stop_token_ids": [1, 401]}, "stop_token_ids", "stop_token_ids[1] is 401"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "-1"),
    ({"stop_token_ids": [1] * 1025}, "stop_token_ids", "1025 ids"),
    ({"ignore_eos": 2}, "ignore_eos", "bool"),
    ({"stream": "yes"}, "stream", '"yes"'),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream is true"),
    ({"stream": True, "stream_options": {"include_usage": 2}}, "stream_options.include_usage", "bool"),
    ({"echo": 2}, "echo", "bool"),
    ({"logprobs": -1}, "logprobs", "between 0 and 20, not -1"),
    ({"logprobs": 21}, "logprobs", "between 0 and 20, not 21"),
    ({"logprobs": True}, "logprobs", "true"),
    ({"logprobs": 21, "echo": True}, "logprobs", "not 21"),
    ({"top_logprobs": 2}, "top_logprobs", "Did you mean"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "between 0 and 20, not -1"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "not 21"),
    ({"prompt_logprobs": 20, "prompt": [[5] * 200] * 100}, "prompt_logprobs", "at most 262144 are told"),
    ({"logprobs": 20, "echo": True, "prompt": [5] * 200, "n": 128}, "prompt_logprobs", "in 128 choices"),
    ({"logit_bias": {"five": 1}}, "logit_bias", 'the key "five"; token ids are 0 to 400'),
    ({"logit_bias": {"401": 1}}, "logit_bias", '"401"'),
    ({"logit_bias": {"-1": 1}}, "logit_bias", '"-1"'),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "token ids are"),
    ({"logit_bias": {"5": 100.5}}, "logit_bias", 'logit_bias["5"] must be between -100 and 100, not 100.5'),
    ({"logit_bias": {"5": "much"}}, "logit_bias", "str"),
    ({"logit_bias": [1]}, "logit_bias", "array"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "1025 entries; at most 1024"),
    ({"presence_penalty": 2.5}, "presence_penalty", "between -2 and 2, not 2.5"),
    ({"frequency_penalty": -2.1}, "frequency_penalty", "between -2 and 2, not -2.1"),
    ({"repetition_penalty": 0}, "repetition_penalty", "between 0.01 and 100, not 0"),
    ({"repetition_penalty": 1000}, "repetition_penalty", "not 1000"),
    ({"bad_words": ["a", ""]}, "bad_words", "bad_words[1] is empty"),
    ({"bad_words": "word"}, "bad_words", '"word"'),
    ({"bad_words": ["x" * 129]}, "bad_words", "129 characters; at most 128"),
    ({"bad_words": ["x"] * 501}, "bad_words", "501 words; at most 500"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "is empty"),
    ({"allowed_token_ids": [5, 401]}, "allowed_token_ids", "allowed_token_ids[1] is 401"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids", "is -1; token ids are 0 to 400"),
    ({"min_tokens": -1}, "min_tokens", "between 0 and max_tokens (16), not -1"),
    ({"min_tokens": 17}, "min_tokens", "between 0 and max_tokens (16), not 17"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "max_tokens (4), not 5"),
    ({"allowed_token_ids": [0], "min_tokens": 1}, "allowed_token_ids", "and min_tokens leave no token"),
    (
        {"allowed_token_ids": [9], "min_tokens": 1, "stop_token_ids": [9]},
        "allowed_token_ids",
        "leave no token",
    ),
    ({"max_tokens": 0, "echo": False}, "max_tokens", "at least 1"),
    ({"return_tokens_as_token_ids": "yes"}, "return_tokens_as_token_ids", '"yes"'),
    ({"best_of": 2}, "best_of", "best_of is 2; without use_beam_search, 1 is allowed"),
    ({"length_penalty": 2}, "length_penalty", "without use_beam_search, 1.0 is allowed"),
    ({"early_stopping": True}, "early_stopping", "without use_beam_search, false is allowed"),
    ({"use_beam_search": 2}, "use_beam_search", "bool"),
    (BEAMS | {"best_of": 0}, "best_of", "between 1 and 16 with use_beam_search, not 0"),
    (BEAMS | {"best_of": 17}, "best_of", "not 17"),
    (BEAMS | {"best_of": 2, "n": 3}, "best_of", "at least n (3), not 2"),
    (BEAMS | {"n": 17}, "n", "between 1 and 16 with use_beam_search, not 17"),
    (BEAMS | {"length_penalty": 10.5}, "length_penalty", "between -10 and 10, not 10.5"),
    (BEAMS | {"early_stopping": "soon"}, "early_stopping", 'true, false or "never", not "soon"'),
    (BEAMS | {"early_stopping": 2}, "early_stopping", "2"),
    (BEAMS | {"temperature": 0.5}, "temperature", "temperature (0.5) is not allowed with use_beam_search"),
    (BEAMS | {"top_p": 0.5}, "top_p", "not allowed with use_beam_search"),
    (BEAMS | {"top_k": 5}, "top_k", "not allowed with use_beam_search"),
    (BEAMS | {"min_p": 0.5}, "min_p", "not allowed with use_beam_search"),
    (BEAMS | {"stop": ["x", "y"]}, "stop", 'stop (["x","y"]) is not allowed'),
    (BEAMS | {"repetition_penalty": 1.5}, "repetition_penalty", "not allowed with use_beam_search"),
    (BEAMS | {"presence_penalty": 1}, "presence_penalty", "not allowed with use_beam_search"),
    (BEAMS | {"frequency_penalty": 1}, "frequency_penalty", "not allowed with use_beam_search"),
    (BEAMS | {"logit_bias": {"5": 1}}, "logit_bias", "not allowed with use_beam_search"),
    (BEAMS | {"min_tokens": 1}, "min_tokens", "not allowed with use_beam_search"),
    (BEAMS | {"bad_words": ["x"]}, "bad_words", "not allowed with use_beam_search"),
    (BEAMS | {"allowed_token_ids": [5]}, "allowed_token_ids", "not allowed with use_beam_search"),
    (BEAMS | {"response_format": {"type": "json_object"}}, "response_format", "not allowed with"),
    (BEAMS | {"guided_regex": "a+"}, "guided_regex", "not allowed with use_beam_search"),
    ({"suffix": "end"}, "suffix", "not supported"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1, or between 1 and 255"),
    ({"truncate_prompt_tokens": 256}, "truncate_prompt_tokens", "not 256"),
    ({"truncate_prompt_tokens": 5, "prompt": ""}, "prompt", "empty"),
    ({"truncate_prompt_tokens": 5, "prompt": [1, 401]}, "prompt", "prompt[1] is 401"),
    ({"truncation_side": "middle"}, "truncation_side", "left or right"),
    ({"detokenize": False, "stop": "x"}, "stop", "detokenize is false"),
    ({"detokenize": False, "echo": True}, "echo", "detokenize is false"),
    ({"request_id": ""}, "request_id", "1 to 128 of A-Z"),
    ({"request_id": "a b"}, "request_id", '"a b"'),
    ({"request_id": "x" * 129}, "request_id", "1 to 128"),
    (
        {"structured_outputs": {"json_object": True, "whitespace_pattern": " "}},
        "structured_outputs.whitespace_pattern",
        "not supported",
    ),
    ({"temprature": 0.5}, "temprature", "Did you mean temperature?"),
    ({"model": 5}, "model", "5"),
]


@pytest.mark.parametrize(
    ("fields", "param", "message"), all_deep_but(65, BAD_FIELDS), ids=lambda value: str(value)[:40]
)
async def test_bad_completion_fields(
    client: httpx.AsyncClient, ring: FakeRing, fields: dict[str, object], param: str, message: str
) -> None:
    error = error_of(await client.post(COMPLETIONS, json={"prompt": "a", **fields}))
    assert error["param"] == param
    assert message in (error["message"] or "")
    assert error["type"] == "invalid_request_error"
    assert len(error["message"] or "") < 400
    assert ring.calls == []


BAD_CHATS: list[tuple[dict[str, object], str, str]] = [
    ({"messages": []}, "messages", "empty"),
    ({"messages": "hi"}, "messages", '"hi"'),
    ({"messages": [{"content": "a"}]}, "messages[0].role", "required"),
    ({"messages": [USER, {"role": "robot", "content": "a"}]}, "messages[1].role", '"robot"'),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "required"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "5"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
        "required",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
        "only text",
    ),
    ({"messages": [{"role": "function", "content": "a"}]}, "messages[0].role", "must be one of"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages", "unknown role"),
    ({"messages": [{"role": "user", "content": "fox zebra " * 300}]}, "messages", "256 tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
    ({"max_completion_tokens": 256}, "max_completion_tokens", "at most"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "--tool-call-parser"),
    ({"functions": [{"name": "f"}]}, "functions", "not supported"),
    ({"logprobs": 3}, "logprobs", "bool"),
    ({"top_logprobs": 2}, "top_logprobs", "only allowed when logprobs is true"),
    ({"top_logprobs": 2, "logprobs": False}, "top_logprobs", "only allowed when logprobs is true"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "between 0 and 20, not 21"),
    ({"min_tokens": 9, "max_completion_tokens": 8}, "min_tokens", "max_completion_tokens (8), not 9"),
    (
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
        "are both true",
    ),
    (
        {"continue_final_message": True, "messages": [USER, {"role": "assistant", "content": ""}]},
        "messages[1].content",
        "nothing to go on with",
    ),
    ({"documents": ["a"]}, "documents[0]", "object"),
    ({"documents": [{"text": "a" * 300_000}]}, "documents", "at most 262144 are allowed"),
    (
        {"detokenize": False, "tools": [{"type": "function", "function": {"name": "f"}}]},
        "tools",
        "detokenize",
    ),
    ({"chat_template": "{{ messages }}"}, "chat_template", "the model's own template"),
    ({"prompt": "a"}, "prompt", "Unknown field"),
    ({"n": 129}, "n", "129"),
]


@pytest.mark.parametrize(("fields", "param", "message"), BAD_CHATS, ids=lambda value: str(value)[:40])
async def test_bad_chat_fields(
    client: httpx.AsyncClient, ring: FakeRing, fields: dict[str, object], param: str, message: str
) -> None:
    error = error_of(await client.post(CHAT, json={"messages": [USER], **fields}))
    assert error["param"] == param
    assert message in (error["message"] or "")
    assert ring.calls == []


async def test_fields_that_ask_for_nothing_are_accepted(client: httpx.AsyncClient) -> None:
    neutral = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "echo": False,
        "logprobs": None,
        "logit_bias": {},
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_tokens": 0,
        "bad_words": [],
        "allowed_token_ids": None,
        "prompt_logprobs": None,
        "return_tokens_as_token_ids": False,
        "best_of": 1,
        "length_penalty": 1,
        "early_stopping": False,
        "use_beam_search": False,
        "suffix": None,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "guided_json": None,
        "stop": [],
        "seed": None,
        "n": None,
        "temperature": None,
    }
    assert (await client.post(COMPLETIONS, json={"prompt": "a", **neutral})).status_code == 200
    assert (await client.post(CHAT, json={"messages": [USER], **neutral})).status_code == 200


async def test_what_changes_nothing_is_accepted_with_beams(client: httpx.AsyncClient, ring: FakeRing) -> None:
    neutral = {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "seed": 5, "stop": [], "min_tokens": 0}
    asked = {"prompt": "a", "use_beam_search": True, "best_of": 4, "n": 2, "length_penalty": 0.6, **neutral}
    assert (await client.post(COMPLETIONS, json=asked)).status_code == 200
    assert (await client.post(COMPLETIONS, json=asked | {"temperature": 1, "n": 4})).status_code == 200
    assert [call.params.beam_search for call in ring.calls] == [BeamParams(4, 0.6)] * 6


async def test_unknown_fields_are_taken_and_told(client: httpx.AsyncClient) -> None:
    odd = {"frobnicate": 1, "nothing": None, "Ünicode": 2, "a: b\r\nset-cookie: c": 3, "user": "me"}
    for path, body in (
        (COMPLETIONS, {"prompt": "a"}),
        (CHAT, {"messages": [USER]}),
        ("/tokenize", {"prompt": "a"}),
    ):
        for stream in ({}, {"stream": True}) if path != "/tokenize" else ({},):
            response = await client.post(path, json={**body, **odd, **stream})
            assert response.status_code == 200, response.text
            assert response.headers["x-baton-ignored-fields"] == "frobnicate, user"
            assert "set-cookie" not in response.headers
    assert "x-baton-ignored-fields" not in (await client.post(COMPLETIONS, json={"prompt": "a"})).headers


async def test_unknown_fields_are_few(client: httpx.AsyncClient) -> None:
    many = {f"unknown_{index}": 1 for index in range(33)}
    error = error_of(await client.post(COMPLETIONS, json={"prompt": "a", **many}))
    assert (error["param"], error["code"]) == ("unknown_32", "unknown_parameter")


async def test_a_message_as_the_client_got_it_is_accepted(client: httpx.AsyncClient) -> None:
    answered = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "audio": None}
    assert (await client.post(CHAT, json={"messages": [USER, answered, USER]})).status_code == 200


BAD_BODIES: list[tuple[bytes, str]] = [
    (b"", "no body"),
    (b"  ", "no body"),
    (b"{", "truncated"),
    (b'{"prompt": "a",}', "not valid JSON"),
    (b'{"prompt": NaN}', "not valid JSON"),
    (b'{"prompt": "a", "temperature": NaN}', "not valid JSON"),
    (b'{"prompt": "a", "temperature": 1e999}', "not valid JSON"),
    (b'{"prompt": "\xff\xfe"}', "not UTF-8"),
    (b"\xff\xfe{", "not valid JSON"),
    (b'{"prompt": "\\ud800"}', "not valid JSON"),
    (b"[1]", "must be a JSON object"),
    (b'"a"', "must be a JSON object"),
    (b"[" * 200_000, "nested too deeply"),
    (b'{"prompt":' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested too deeply"),
    (b'{"prompt": "a\x00"}', "not valid JSON"),
]


@pytest.mark.parametrize(("body", "message"), all_deep_but(5, BAD_BODIES), ids=lambda value: str(value[:20]))
async def test_bad_bodies(client: httpx.AsyncClient, body: bytes, message: str) -> None:
    for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize"):
        response = await client.post(path, content=body, headers={"content-type": "application/json"})
        assert message in (error_of(response)["message"] or "")


async def test_wrong_content_type(client: httpx.AsyncClient) -> None:
    response = await client.post(COMPLETIONS, data={"prompt": "a"})
    assert error_of(response, 415)["code"] == "unsupported_media_type"
    response = await client.post(COMPLETIONS, content=b'{"prompt": "a"}')
    assert "missing" in (error_of(response, 415)["message"] or ""), "a page may send that unasked"
    json = {"content-type": "application/json; charset=utf-8"}
    response = await client.post(COMPLETIONS, content=b'{"prompt": "a"}', headers=json)
    assert response.status_code == 200


async def test_routes_and_methods(client: httpx.AsyncClient) -> None:
    assert error_of(await client.get("/nowhere"), 404)["code"] == "not_found"
    response = await client.get(COMPLETIONS)
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"


async def test_unknown_model(client: httpx.AsyncClient) -> None:
    for path, body in (
        (COMPLETIONS, {"prompt": "a"}),
        (CHAT, {"messages": [USER]}),
        ("/tokenize", {"prompt": "a"}),
    ):
        error = error_of(await client.post(path, json={**body, "model": "other"}), 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert '"other"' in (error["message"] or "")
        assert '"tiny"' in (error["message"] or "")


async def test_bad_tokens(client: httpx.AsyncClient) -> None:
    assert error_of(await client.post("/detokenize", json={"tokens": [401]}))["param"] == "tokens"
    assert error_of(await client.post("/detokenize", json={"tokens": [-1]}))["param"] == "tokens"
    assert error_of(await client.post("/detokenize", json={}))["param"] == "tokens"
    assert error_of(await client.post("/tokenize", json={}))["param"] == "prompt"
    both = {"prompt": "a", "messages": [USER]}
    assert error_of(await client.post("/tokenize", json=both))["param"] == "prompt"


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_huge_body_is_refused_without_being_kept(client: httpx.AsyncClient, chunked: bool) -> None:
    size, piece = 100 * 1024 * 1024, b" " * 65536

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(size // len(piece)):
            yield piece

    headers = {"content-type": "application/json"}
    if not chunked:
        headers["content-length"] = str(size)
    process = psutil.Process(os.getpid())
    before, started = process.memory_info().rss, time.monotonic()
    response = await client.post(COMPLETIONS, content=pieces(), headers=headers)
    error = error_of(response, 413)
    assert error["code"] == "request_too_large"
    assert "8388608" in (error["message"] or "")
    assert time.monotonic() - started < 5
    assert process.memory_info().rss - before < 50 * 1024 * 1024


async def test_a_declared_huge_body_is_refused_before_it_is_sent(client: httpx.AsyncClient) -> None:
    reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: 104857600\r\nExpect: 100-continue\r\n\r\n"
    )
    async with asyncio.timeout(1):
        assert b" 413 " in await reader.readline()
    writer.close()


async def test_a_body_at_the_limit_is_read(ring: FakeRing, tokenizer: Tokenizer) -> None:
    body = json.dumps({"prompt": "a"}).encode()
    settings = ApiSettings(max_body_bytes=len(body))
    async with serving(ring, tokenizer, settings) as url, httpx.AsyncClient(base_url=url) as client:
        headers = {"content-type": "application/json"}
        assert (await client.post(COMPLETIONS, content=body, headers=headers)).status_code == 200
        error_of(await client.post(COMPLETIONS, content=body + b" ", headers=headers), 413)


async def test_settings_move_the_limits(ring: FakeRing, tokenizer: Tokenizer) -> None:
    settings = ApiSettings(max_n=2, max_stop_strings=1)
    async with serving(ring, tokenizer, settings) as url, httpx.AsyncClient(base_url=url) as client:
        body = {"prompt": "a", "n": 2, "stop": "x"}
        assert (await client.post(COMPLETIONS, json=body)).status_code == 200
        assert "between 1 and 2" in (
            error_of(await client.post(COMPLETIONS, json={**body, "n": 3}))["message"] or ""
        )
        assert "at most 1" in (
            error_of(await client.post(COMPLETIONS, json={**body, "stop": ["x", "y"]}))["message"] or ""
        )


async def test_top_k_and_seed_edges_reach_the_ring(client: httpx.AsyncClient, ring: FakeRing) -> None:
    for body in (
        {"top_k": -1, "seed": -(2**63)},
        {"top_k": 2**31 - 1, "seed": 2**64 - 1},
        {"temperature": 2, "top_p": 1, "min_p": 1},
    ):
        assert (await client.post(COMPLETIONS, json={"prompt": "a", **body})).status_code == 200
    params = [call.params for call in ring.calls]
    assert [p.top_k for p in params] == [0, 401, 0]
    assert [p.seed for p in params[:2]] == [2**63, 2**64 - 1]
