"""Every feature gives, through the ring over tcp and over ucx, what one worker gives (docs/features.md)."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest

from tests.support.clients import RingClient
from tests.support.deep import all_deep_but
from tests.support.ring import Ring, Service, running, running_routers, worker
from tests.support.same import is_same

pytestmark = pytest.mark.beside

UCXX = importlib.util.find_spec("ucxx") is not None
PATHS = ("tcp", pytest.param("ucx", marks=pytest.mark.skipif(not UCXX, reason="ucxx is not installed")))
CONNECTORS = ("tcp", "ucx") if UCXX else ("tcp",)
OPTIONS = (
    *("--block-size", "16", "--num-blocks", "600", "--prefill-chunk", "64"),
    *("--scheduling-policy", "priority", "--priority-aging", "5"),
)
METHODS = ("ngram", "draft", "medusa", "eagle")
PROMPT = "What is a KV block? What is prefill? What is decode? Tell me about "
SCHEMA = {
    "type": "object",
    "properties": {"role": {"enum": ["prefill", "decode"]}, "blocks": {"type": "integer", "maximum": 99}},
    "required": ["role", "blocks"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "scale", "description": "Scale a role.", "parameters": SCHEMA},
}
CSV = 'root ::= row ("\\n" row)*\nrow ::= cell ("," cell)*\ncell ::= [a-z]{1,4}'
QUESTION = [{"role": "user", "content": "What is a KV block?"}]
CHAT = "/v1/chat/completions"

Choice = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A request that uses a feature. ``shows`` asserts, of one worker's choices, that it was in force."""

    fields: Mapping[str, Any]
    shows: Callable[[list[Choice]], bool]
    path: str = "/v1/completions"
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        question = {"messages": QUESTION} if self.path == CHAT else {"prompt": PROMPT}
        shared = {"model": "demo", "max_tokens": 24, "temperature": 0, "return_token_ids": True}
        return {**shared, **question, **self.fields}


def anything(choices: list[Choice]) -> bool:
    return all(choice["token_ids"] for choice in choices)


def is_json(choices: list[Choice]) -> bool:
    return all(set(json.loads(choice["text"])) == {"role", "blocks"} for choice in choices)


def calls(choices: list[Choice]) -> bool:
    [call] = choices[0]["message"]["tool_calls"]
    return call["function"]["name"] == "scale" and "role" in json.loads(call["function"]["arguments"])


GUIDED = {"temperature": 0.8, "seed": 3, "max_tokens": 80}
CASES: Mapping[str, Case] = {
    "greedy": Case({}, anything),
    "chat": Case({}, lambda c: "block" in c[0]["message"]["content"], path=CHAT),
    "seed": Case({"temperature": 1.0, "seed": 11}, anything),
    "top_k": Case({"temperature": 2.0, "seed": 11, "top_k": 5}, anything),
    "top_p": Case({"temperature": 2.0, "seed": 11, "top_p": 0.5}, anything),
    "min_p": Case({"temperature": 2.0, "seed": 11, "min_p": 0.1}, anything),
    "repetition_penalty": Case({"repetition_penalty": 1.8}, anything),
    "presence_penalty": Case({"presence_penalty": 2.0}, anything),
    "frequency_penalty": Case({"frequency_penalty": 2.0}, anything),
    "logit_bias": Case(
        {"logit_bias": {"300": 100}, "max_tokens": 9}, lambda c: c[0]["token_ids"] == [300] * 9
    ),
    "min_tokens": Case(
        {"min_tokens": 60, "max_tokens": 60}, lambda c: len(c[0]["token_ids"]) == 60, path=CHAT
    ),
    "stop": Case({"stop": ["block"]}, lambda c: "block" not in c[0]["message"]["content"], path=CHAT),
    "include_stop_str_in_output": Case(
        {"stop": ["block"], "include_stop_str_in_output": True},
        lambda c: c[0]["message"]["content"].endswith("block") and c[0]["stop_reason"] == "block",
        path=CHAT,
    ),
    "detokenize": Case({"detokenize": False}, lambda c: c[0]["text"] == "" and len(c[0]["token_ids"]) > 4),
    "truncate_prompt_tokens": Case(
        {"truncate_prompt_tokens": 17, "truncation_side": "right"},
        lambda c: len(c[0]["prompt_token_ids"]) == 17,
    ),
    "continue_final_message": Case(
        {"messages": [*QUESTION, {"role": "assistant", "content": "A KV"}], "continue_final_message": True},
        lambda c: c[0]["message"]["content"].startswith(" block"),
        path=CHAT,
    ),
    "stop_token_ids": Case(
        {"logit_bias": {"300": 100}, "stop_token_ids": [300]},
        lambda c: len(c[0]["token_ids"]) == 1 and c[0]["finish_reason"] == "stop",
    ),
    "bad_words": Case(
        {"bad_words": ["block", " block"]}, lambda c: "block" not in c[0]["message"]["content"], path=CHAT
    ),
    "allowed_token_ids": Case(
        {"allowed_token_ids": list(range(300, 330))}, lambda c: set(c[0]["token_ids"]) <= set(range(300, 330))
    ),
    "ignore_eos": Case(
        {"ignore_eos": True, "max_tokens": 90}, lambda c: len(c[0]["token_ids"]) == 90, path=CHAT
    ),
    "logprobs": Case(
        {"logprobs": 3}, lambda c: {len(top) for top in c[0]["logprobs"]["top_logprobs"]} <= {3, 4}
    ),
    "prompt_logprobs": Case({"prompt_logprobs": 2}, lambda c: len(c[0]["prompt_logprobs"]) > 10),
    "echo": Case(
        {"echo": True, "logprobs": 1}, lambda c: c[0]["text"].startswith(PROMPT) and len(c[0]["logprobs"]) > 0
    ),
    "n": Case(
        {"n": 4, "temperature": 1.5, "seed": 5}, lambda c: len({tuple(x["token_ids"]) for x in c}) == 4
    ),
    "beams": Case(
        {"use_beam_search": True, "best_of": 4, "n": 3},
        lambda c: len({tuple(x["token_ids"]) for x in c}) == 3,
    ),
    "json_schema": Case({"structured_outputs": {"json": SCHEMA}, **GUIDED}, is_json),
    "response_format": Case(
        {
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
            **GUIDED,
        },
        lambda c: "role" in json.loads(c[0]["message"]["content"]),
        path=CHAT,
    ),
    "json_object": Case(
        {"response_format": {"type": "json_object"}, **GUIDED, "logit_bias": {"96": 2}},
        lambda c: c[0]["message"]["content"].lstrip().startswith("{"),
        path=CHAT,
    ),
    "regex": Case(
        {"structured_outputs": {"regex": "[a-c]{7}-[0-9]{2}"}, **GUIDED}, lambda c: c[0]["text"][7] == "-"
    ),
    "choice": Case(
        {"structured_outputs": {"choice": ["prefill", "decode"]}, **GUIDED},
        lambda c: c[0]["text"] in ("prefill", "decode"),
    ),
    "grammar": Case({"structured_outputs": {"grammar": CSV}, **GUIDED}, lambda c: c[0]["text"][0].islower()),
    "guided_choice": Case({"guided_choice": ["ring"], **GUIDED}, lambda c: c[0]["text"] == "ring"),
    "n and json_schema": Case(
        {"structured_outputs": {"json": SCHEMA}, **GUIDED, "n": 3}, lambda c: len(c) == 3 and is_json(c)
    ),
    "tools": Case(
        {"tools": [TOOL], "tool_choice": "required", **GUIDED, "parallel_tool_calls": False}, calls, path=CHAT
    ),
    "priority": Case({"priority": -3}, anything),
    "deadline": Case({}, anything, headers={"x-request-timeout": "100"}),
}


@pytest.fixture(scope="module")
def rings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Ring]]:
    """One worker of both roles; rings of a prefill worker for each connector and one decode worker, all of
    which launch steps ahead; and rings of the same prefill workers and, for each way to draft, a decode
    worker that drafts."""
    tmp = tmp_path_factory.mktemp("features")

    def start(name: str, role: str, *options: str) -> Service:
        return worker(tmp, name, role, "demo", *OPTIONS, *options)

    ahead = ("--async-scheduling", "on")
    one, decode = start("both", "both"), start("decode", "decode", *ahead)
    over = {path: start(path, "prefill", "--connector", path, *ahead) for path in CONNECTORS}
    drafting = {method: start(method, "decode", "--speculative-method", method) for method in METHODS}
    groups = {"one worker": [one], **{path: [prefill, decode] for path, prefill in over.items()}}
    for path, method in product(over, drafting):
        groups[f"{path} {method}"] = [over[path], drafting[method]]
    workers = [one, decode, *over.values(), *drafting.values()]
    with running(workers), running_routers(tmp, "demo", groups) as rings:
        yield rings


@pytest.fixture
async def clients(rings: Mapping[str, Ring]) -> AsyncIterator[Mapping[str, RingClient]]:
    clients = {name: RingClient(ring.url, "demo") for name, ring in rings.items()}
    yield clients
    for name, client in clients.items():
        await client.http.aclose()
        rings[name].wait_idle()


async def ask(client: RingClient, case: Case) -> list[Choice]:
    """The choices of an answer, without what is told of it and not of the text."""
    response = await client.http.post(case.path, json=case.body(), headers=case.headers)
    assert response.status_code == 200, response.text
    choices: list[Choice] = response.json()["choices"]
    for choice in choices:
        for call in choice.get("message", {}).get("tool_calls") or ():
            del call["id"]
    return choices


async def ask_streamed(client: RingClient, case: Case) -> dict[int, list[int]]:
    """Index of a choice → its tokens."""
    body = {**case.body(), "stream": True}
    told: dict[int, list[int]] = {}
    async with client.http.stream("POST", case.path, json=body, headers=case.headers) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                for choice in event["choices"]:
                    told.setdefault(choice["index"], []).extend(choice.get("token_ids") or [])
    return told


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("path", all_deep_but(1, PATHS))
async def test_equals_one_worker(clients: Mapping[str, RingClient], path: str, name: str) -> None:
    case = CASES[name]
    expected = await ask(clients["one worker"], case)
    assert case.shows(expected), expected
    assert is_same(await ask(clients[path], case), expected)
    streamed = await ask_streamed(clients[path], case)
    assert streamed == {choice["index"]: choice["token_ids"] for choice in expected}


def accepted(ring: Ring) -> float:
    [decode] = ring.of_role("decode")
    metrics = decode.metrics().items()
    return sum(n for name, n in metrics if name.startswith("baton_speculation_accepted_tokens_total"))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("path", all_deep_but(1, PATHS))
async def test_drafts_change_nothing(
    rings: Mapping[str, Ring], clients: Mapping[str, RingClient], path: str, method: str
) -> None:
    ring = f"{path} {method}"
    before = accepted(rings[ring])
    for name in (
        "greedy",
        "chat",
        "seed",
        "frequency_penalty",
        "logit_bias",
        "logprobs",
        "n",
        "grammar",
        "beams",
    ):
        expected = await ask(clients["one worker"], CASES[name])
        assert is_same(await ask(clients[ring], CASES[name]), expected), name
    assert accepted(rings[ring]) > before


@pytest.mark.parametrize("path", all_deep_but(1, PATHS))
async def test_the_handoffs_went_over_it(rings: Mapping[str, Ring], path: str) -> None:
    [prefill] = rings[path].of_role("prefill")
    sent = {
        name: n for name, n in prefill.metrics().items() if name.startswith("baton_handoff_sent_bytes_total")
    }
    assert sum(sent.values()) > 0
    assert all(f'connector="{path}"' in name for name in sent), sent
