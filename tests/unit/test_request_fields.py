"""What becomes of each field of vLLM's requests is what the tables say, which the router reads bodies by."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import httpx
import pytest

from baton import SamplingParams, StructuredOutputs
from baton.request.errors import RequestError
from baton.request.structured import form_of
from baton.router.api.http.app import create_app
from baton.router.api.http.preparing.kinds import GENERATING, KINDS
from baton.router.api.http.server.field_rules import EVERYWHERE, BodyKind
from baton.router.api.ignored import MAX_TOLD, can_be_told, ignored_header
from baton.text.tokenizer import Tokenizer
from scripts.reference.fields import listed, offline_rule, rule_on, structured_rule
from tests.support.fake_ring import MODEL, FakeRing
from tests.support.tiny_tokenizers import TOOL_TEMPLATE, byte_level_tokenizer

T = TypeVar("T")

FIELDS = listed()
PATHS = [kind for kind in KINDS.values() if kind.path]
TOLD = "x-baton-ignored-fields"

USER = {"role": "user", "content": "hi"}
BODIES: Mapping[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [USER], "max_tokens": 3},
    "/v1/responses": {"input": "hi", "max_output_tokens": 3},
    "/v1/messages": {"messages": [USER], "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": [USER]},
    "/tokenize": {"messages": [USER]},
    "/detokenize": {"tokens": [5]},
}
TOOL = {"type": "function", "function": {"name": "f"}}
FLAT_TOOL = {"type": "function", "name": "f"}
OWN_TOOL = {"name": "f", "input_schema": {"type": "object"}}

SAMPLES: Mapping[str, Any] = {
    "add_generation_prompt": False,
    "add_special_tokens": True,
    "allowed_token_ids": [5, 6],
    "background": True,
    "bad_words": ["fox"],
    "cache_salt": "s",
    "chat_template": "x",
    "chat_template_kwargs": {"opens": False},
    "continue_final_message": True,
    "detokenize": False,
    "documents": [{"title": "t", "text": "x"}],
    "echo": True,
    "ec_transfer_params": {"a": 1},
    "enable_response_messages": True,
    "frequency_penalty": 0.5,
    "ignore_eos": True,
    "include": ["message.output_text.logprobs"],
    "include_reasoning": False,
    "include_stop_str_in_output": True,
    "input": "hi",
    "instructions": "be brief",
    "kv_transfer_params": {"do_remote_decode": True},
    "length_penalty": 1.0,
    "logit_bias": {"5": 1},
    "logprob_token_ids": [5],
    "max_completion_tokens": 3,
    "max_output_tokens": 3,
    "max_tokens": 3,
    "max_tool_calls": 3,
    "media_io_kwargs": {"image": {}},
    "messages": [USER],
    "metadata": {"a": "b"},
    "min_p": 0.1,
    "min_tokens": 1,
    "mm_payload": "none",
    "mm_processor_kwargs": {"a": 1},
    "model": "tiny",
    "n": 2,
    "output_config": {"effort": None},
    "parallel_tool_calls": False,
    "presence_penalty": 0.5,
    "previous_input_messages": [{"role": "user"}],
    "previous_response_id": "resp_1",
    "priority": 3,
    "prompt_cache_key": "k",
    "prompt_embeds": "QUJD",
    "prompt_logprobs": 1,
    "reasoning": {"effort": "medium"},
    "reasoning_effort": "medium",
    "repetition_detection": {"max_pattern_size": 3, "min_count": 2},
    "repetition_penalty": 1.5,
    "request_id": "mine",
    "response_format": {"type": "text"},
    "return_mm_kwargs": False,
    "return_prompt_text": True,
    "return_token_ids": True,
    "return_token_offsets": True,
    "return_token_strs": True,
    "return_tokens_as_token_ids": True,
    "routed_experts_prompt_start": 1,
    "seed": 5,
    "service_tier": "auto",
    "session_id": "s",
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "stop": ["fox"],
    "stop_sequences": ["fox"],
    "stop_token_ids": [7],
    "store": True,
    "stream": True,
    "stream_interval": 2,
    "stream_options": {"include_usage": True},
    "structured_outputs": {"json_object": True},
    "suffix": "x",
    "system": "be brief",
    "temperature": 0.5,
    "text": {"format": {"type": "text"}},
    "thinking": {"type": "adaptive"},
    "thinking_token_budget": 5,
    "tokens": [5, 6],
    "tool_choice": "auto",
    "tools": [TOOL],
    "top_k": 3,
    "top_logprobs": 2,
    "top_p": 0.5,
    "truncate_prompt_tokens": 2,
    "truncation": "auto",
    "truncation_side": "right",
    "use_beam_search": True,
    "user": "me",
    "vllm_xargs": {"a": 1},
    "watermarking": True,
    # Of which the paths have their own kinds.
    "/v1/completions logprobs": 2,
    "/v1/completions prompt": [5, 6],
    "/v1/chat/completions logprobs": True,
    "/v1/responses prompt": {"id": "p"},
    "/v1/responses tools": [FLAT_TOOL],
    "/v1/messages tools": [OWN_TOOL],
    "/v1/messages tool_choice": {"type": "auto"},
    "/v1/messages/count_tokens tools": [OWN_TOOL],
    "/v1/messages/count_tokens tool_choice": {"type": "auto"},
    "/tokenize prompt": None,
}
"""A value of each of vLLM's fields, which asks for something."""

BESIDE: Mapping[str, dict[str, Any]] = {
    "continue_final_message": {"messages": [USER, {"role": "assistant", "content": "so"}]},
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "/v1/responses top_logprobs": {"include": ["message.output_text.logprobs"]},
    "tool_choice": {"tools": [TOOL]},
    "/v1/responses tool_choice": {"tools": [FLAT_TOOL]},
    "/v1/messages tool_choice": {"tools": [OWN_TOOL]},
    "/v1/messages/count_tokens tool_choice": {"tools": [OWN_TOOL]},
    "return_token_strs": {},
}
"""The fields that a field needs beside it."""


def of_path(samples: Mapping[str, Any], kind: BodyKind, name: str) -> Any:
    return samples.get(f"{kind.path} {name}", samples.get(name))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level_tokenizer(tmp_path_factory.mktemp("model"), template=TOOL_TEMPLATE)


@pytest.fixture
async def client(tokenizer: Tokenizer) -> AsyncIterator[httpx.AsyncClient]:
    ring = FakeRing(lambda call: [10, 11, 12], model=replace(MODEL, takes_priorities=True))
    transport = httpx.ASGITransport(create_app(ring, tokenizer))
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        yield client


def test_each_field_of_vllm_has_a_row() -> None:
    assert {kind.path for kind in PATHS} | {"SamplingParams", "structured_outputs"} == FIELDS.keys()
    for kind in PATHS:
        for name in FIELDS[kind.path]:
            assert rule_on(kind, name)
            assert f"{kind.path} {name}" in SAMPLES or name in SAMPLES, f"{kind.path} {name} is not tried"
    for name in FIELDS["SamplingParams"]:
        assert offline_rule(name)
    for name in FIELDS["structured_outputs"]:
        assert structured_rule(name)


def test_each_difference_and_reason_is_told() -> None:
    for kind in PATHS:
        for name in {*FIELDS[kind.path], *kind.own, *EVERYWHERE}:
            rule = rule_on(kind, name)
            assert bool(rule.why) == (rule.verdict != "taken"), name
            assert not rule.why.endswith("."), name


@pytest.mark.parametrize("kind", PATHS, ids=lambda kind: kind.path)
async def test_each_field_is_what_its_row_says(client: httpx.AsyncClient, kind: BodyKind) -> None:
    for name in FIELDS[kind.path]:
        rule, value = rule_on(kind, name), of_path(SAMPLES, kind, name)
        body = {**BODIES[kind.path], **(of_path(BESIDE, kind, name) or {}), name: value}
        response = await client.post(kind.path, json=body)
        if rule.verdict != "refused":
            assert response.status_code == 200, (name, response.text)
            told = response.headers.get(TOLD, "").split(", ")
            assert (name in told) == (rule.verdict == "ignored"), (name, told)
            continue
        error = response.json()["error"]
        assert response.status_code == 400, name
        assert error["message"].startswith(f"{name} is not supported (got {json.dumps(value)[:3]}"), error
        assert f": {rule.why}." in error["message"]
        if "param" in error:
            assert (error["param"], error["code"]) == (name, "unsupported")
        for neutral in (None, *rule.neutral):
            response = await client.post(kind.path, json={**body, name: neutral})
            assert response.status_code == 200, (name, neutral, response.text)


@pytest.mark.parametrize("kind", [kind for kind in PATHS if kind.generates], ids=lambda kind: kind.path)
async def test_fields_of_no_path_are_what_the_table_says(client: httpx.AsyncClient, kind: BodyKind) -> None:
    for name, rule in EVERYWHERE.items():
        if rule_on(kind, name) is not rule or name in SAMPLES:
            continue
        response = await client.post(kind.path, json={**BODIES[kind.path], name: "x"})
        assert response.status_code == (200 if rule.verdict == "ignored" else 400), name
        assert response.headers.get(TOLD) == (name if rule.verdict == "ignored" else None)


async def test_fields_of_another_path_are_not_ignored(client: httpx.AsyncClient) -> None:
    """They would change the answer there; where nothing is generated, they are."""
    response = await client.post("/v1/messages", json={**BODIES["/v1/messages"], "min_p": 0.5})
    assert response.status_code == 400 and 'Unknown field "min_p"' in response.json()["error"]["message"]
    response = await client.post("/tokenize", json={"prompt": "hi", "temperature": 0})
    assert response.status_code == 200 and response.headers[TOLD] == "temperature"


async def test_a_misspelled_field_is_not_ignored(client: httpx.AsyncClient) -> None:
    for wrong, right in (
        ("max_token", "max_tokens"),
        ("stop_token_id", "stop_token_ids"),
        ("logitbias", "logit_bias"),
    ):
        response = await client.post("/v1/completions", json={"prompt": "hi", wrong: 1})
        assert response.status_code == 400
        assert f"Did you mean {right}?" in response.json()["error"]["message"]


def test_the_header_is_bounded() -> None:
    names = [*(f"f{index}" for index in range(100)), "f1"]
    assert len(ignored_header(names)[TOLD].split(", ")) == MAX_TOLD
    assert ignored_header([]) == {}
    assert [can_be_told(name) for name in ("a b", "x" * 65, "é", "a\n", "a_b.c-d")] == [False] * 4 + [True]


NUMBERS = [
    ("/v1/completions", {"max_tokens": "4"}),
    ("/v1/completions", {"max_tokens": 4.0}),
    ("/v1/completions", {"max_tokens": 4, "temperature": "0.5", "logit_bias": {"5": "1"}, "seed": "7"}),
    (
        "/v1/completions",
        {"max_tokens": 4, "stop_token_ids": ["399"], "top_k": "5", "n": "1", "logprobs": "1"},
    ),
    ("/v1/completions", {"max_tokens": "4", "prompt": ["5", "null"]}),
    ("/v1/chat/completions", {"max_completion_tokens": "4", "logprobs": "true", "top_logprobs": "2"}),
    ("/v1/responses", {"max_output_tokens": "4"}),
    ("/v1/messages", {"max_tokens": 4.0, "top_k": "5", "temperature": "1"}),
]


@pytest.mark.parametrize(("path", "fields"), NUMBERS)
async def test_numbers_may_be_texts(
    tokenizer: Tokenizer, client: httpx.AsyncClient, path: str, fields: dict[str, Any]
) -> None:
    body = {**BODIES[path], **fields}
    if path == "/v1/chat/completions":
        del body["max_tokens"]
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    usage = response.json()["usage"]
    choices = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
    assert usage.get("completion_tokens", usage.get("output_tokens")) == 4 * choices
    if choices == 2:
        assert usage["prompt_tokens"] == sum(len(tokenizer.encode(text)) for text in ("5", "null"))


async def test_texts_are_not_made_of_numbers(client: httpx.AsyncClient) -> None:
    for fields in (
        {"model": 5},
        {"stop": [5]},
        {"request_id": 7},
        {"max_tokens": "4.5"},
        {"max_tokens": "x"},
    ):
        response = await client.post("/v1/completions", json={"prompt": "hi", **fields})
        assert response.status_code == 400, fields
        assert response.json()["error"]["code"] == "invalid_type"


def built(cls: Callable[..., T], name: str, value: object, **more: object) -> T:
    return cls(**{name: value}, **more)


def test_programs_have_the_same_fields() -> None:
    for name in FIELDS["SamplingParams"]:
        if offline_rule(name).verdict == "refused":
            with pytest.raises(TypeError, match=name):
                built(SamplingParams, name, None)
        else:
            built(SamplingParams, name, SAMPLES.get(name))


def test_forms_have_the_same_fields() -> None:
    values = {"json": {}, "regex": "a", "choice": ["a"], "grammar": "a", "json_object": True}
    for name in FIELDS["structured_outputs"]:
        rule = structured_rule(name)
        if rule.verdict == "taken":
            assert form_of(built(StructuredOutputs, name, values[name]))
            continue
        value = True if name.startswith("disable") else "x"
        with pytest.raises(RequestError, match=rule.why) as refused:
            form_of(built(StructuredOutputs, name, value, json_object=True))
        assert refused.value.param == f"structured_outputs.{name}"
        assert form_of(built(StructuredOutputs, name, None, json_object=True))


def test_generating_paths_are_those_with_answers() -> None:
    assert {"temperature", "input", "prompt"} <= GENERATING
    assert "return_token_strs" not in GENERATING
