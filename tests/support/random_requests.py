"""Requests with every feature drawn at random, and what asks for them."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

LEAVES_WITHIN_S = 0.3
WHOLE_S = 300.0
SHARED = (
    "What is a KV block? A block holds the keys and values of some tokens of a sequence. ",
    "What is prefill? What is decode? What is a router, and what does it do for both of them? ",
)
SCHEMAS: tuple[dict[str, object], ...] = (
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 4},
    {
        "type": "object",
        "properties": {"role": {"enum": ["prefill", "decode"]}, "ready": {"type": "boolean"}},
        "required": ["role"],
        "additionalProperties": False,
    },
)
FORMS: tuple[dict[str, object], ...] = (
    {"json": SCHEMAS[0]},
    {"json": SCHEMAS[1]},
    {"regex": "[a-z]{2,9}(-[0-9]{1,3})?"},
    {"choice": ["prefill", "decode", "both"]},
    {"grammar": 'root ::= row ("\\n" row)*\nrow ::= cell ("," cell)*\ncell ::= [a-z]{1,4}'},
)
TOOL = {
    "type": "function",
    "function": {
        "name": "scale",
        "parameters": {
            "type": "object",
            "properties": {"role": {"enum": ["prefill", "decode"]}, "by": {"type": "integer"}},
            "required": ["role"],
            "additionalProperties": False,
        },
    },
}


@dataclass(frozen=True)
class Ask:
    path: str
    body: dict[str, Any]
    leaves_after_s: float | None = None
    """The client hangs up then, whatever it has. None: it stays."""
    timeout_s: float | None = None
    """The deadline that it gives."""
    features: frozenset[str] = frozenset()


Fields = Callable[[random.Random], dict[str, Any]]
FEATURES: tuple[tuple[float, Fields], ...] = (
    (0.3, lambda rng: {"n": rng.randint(2, 4)}),
    (0.2, lambda rng: {"repetition_penalty": rng.uniform(0.8, 1.8)}),
    (0.2, lambda rng: {"presence_penalty": rng.uniform(-2, 2)}),
    (0.2, lambda rng: {"frequency_penalty": rng.uniform(-2, 2)}),
    (0.2, lambda rng: {"logit_bias": {str(rng.randrange(4, 4096)): rng.uniform(-50, 50) for _ in range(5)}}),
    (0.2, lambda rng: {"stop": rng.sample(["block", " the", ",", "decode"], 2)}),
    (0.1, lambda rng: {"stop_token_ids": [rng.randrange(4, 4096) for _ in range(20)]}),
    (0.1, lambda rng: {"bad_words": rng.sample(["block", " KV", "decode"], 2)}),
    (0.1, lambda rng: {"seed": rng.randrange(1 << 31)}),
    (0.1, lambda rng: {"prompt_logprobs": rng.randint(0, 5)}),
    (0.3, lambda rng: {"priority": rng.randint(-5, 5)}),
    (0.4, lambda rng: {"stream": True}),
)
"""How many requests in one have it, and what they say then."""

NOT_WITH_BEAMS = frozenset(
    {
        *("temperature", "top_k", "top_p", "min_p", "n", "stop", "min_tokens", "bad_words", "logit_bias"),
        *("repetition_penalty", "presence_penalty", "frequency_penalty", "allowed_token_ids"),
        *("structured_outputs", "tools", "tool_choice"),
    }
)


def draw(rng: random.Random) -> Ask:
    """One request. Most features are in some of them, none in all."""
    body: dict[str, Any] = {"model": "demo", "max_tokens": rng.randint(1, 32), "return_token_ids": True}
    for likelihood, fields in FEATURES:
        if rng.random() < likelihood:
            body |= fields(rng)
    body |= rng.choice((_sampled, _sampled, _greedy))(rng)
    completes = rng.random() < 0.6
    body |= _completion(rng) if completes else _chat(rng)
    if "tools" not in body:
        body |= rng.choice((_free, _free, _formed))(rng)
    if rng.random() < 0.1:
        body = {name: value for name, value in body.items() if name not in NOT_WITH_BEAMS} | _beams(rng)
    if body.get("stream"):
        body.pop("prompt_logprobs", None)
    leaves = rng.uniform(0, LEAVES_WITHIN_S) if rng.random() < 0.05 else None
    timeout = rng.choice((0.05, 30.0)) if rng.random() < 0.05 else None
    features = set(body) - {"model", "max_tokens", "return_token_ids", "prompt", "messages"}
    features |= {"leaving"} if leaves is not None else set()
    features |= {"deadline"} if timeout is not None else set()
    path = "/v1/completions" if completes else "/v1/chat/completions"
    return Ask(path, body, leaves, timeout, frozenset(features))


def _greedy(rng: random.Random) -> dict[str, Any]:
    return {"temperature": 0}


def _sampled(rng: random.Random) -> dict[str, Any]:
    fields = {"top_k": rng.randint(1, 50), "top_p": rng.uniform(0.2, 1), "min_p": rng.uniform(0, 0.3)}
    kept = rng.sample(sorted(fields), rng.randint(0, 3))
    return {"temperature": rng.uniform(0.2, 2), **{name: fields[name] for name in kept}}


def _beams(rng: random.Random) -> dict[str, Any]:
    width = rng.randint(1, 4)
    return {
        "use_beam_search": True,
        "best_of": width,
        "n": rng.randint(1, width),
        "length_penalty": rng.uniform(-1, 2),
        "early_stopping": rng.choice((True, False, "never")),
    }


def _free(rng: random.Random) -> dict[str, Any]:
    ends: tuple[dict[str, Any], ...] = ({}, {"ignore_eos": True}, {"min_tokens": 1})
    barred = {"allowed_token_ids": rng.sample(range(4, 4096), 200)} if rng.random() < 0.1 else {}
    return {**rng.choice(ends), **barred}


def _formed(rng: random.Random) -> dict[str, Any]:
    return {"structured_outputs": rng.choice(FORMS)}


def _completion(rng: random.Random) -> dict[str, Any]:
    prompt = rng.choice(SHARED) * rng.randint(1, 8) + "".join(
        rng.choices("abcdefgh ,.", k=rng.randint(0, 40))
    )
    fields: dict[str, Any] = {"prompt": prompt}
    if rng.random() < 0.3:
        fields["logprobs"] = rng.randint(0, 5)
    if rng.random() < 0.1:
        fields["echo"] = True
    return fields


def _chat(rng: random.Random) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": rng.choice(SHARED) * rng.randint(1, 4)}]
    }
    if rng.random() < 0.3:
        fields |= {"logprobs": True, "top_logprobs": rng.randint(0, 5)}
    if rng.random() < 0.15:
        fields |= {"tools": [TOOL], "tool_choice": rng.choice(("auto", "required", "none"))}
    return fields


@dataclass
class Tally:
    """What became of the requests."""

    ended: Counter[str] = field(default_factory=Counter)
    """finish reason, or name of the error, or "left" → requests."""
    features: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    faults: list[str] = field(default_factory=list)
    """What should not have been, each with the request that met it."""


async def ask_all(url: str, asks: Sequence[Ask], at_once: int) -> Tally:
    tally = Tally()
    room = asyncio.Semaphore(at_once)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=at_once)
    async with httpx.AsyncClient(base_url=url, timeout=WHOLE_S, limits=limits) as http:

        async def one(ask: Ask) -> None:
            async with room:
                await _ask(http, ask, tally)

        await asyncio.gather(*map(one, asks))
    return tally


async def _ask(http: httpx.AsyncClient, ask: Ask, tally: Tally) -> None:
    headers = {} if ask.timeout_s is None else {"x-request-timeout": str(ask.timeout_s)}
    tally.features.update(ask.features)
    try:
        async with asyncio.timeout(ask.leaves_after_s):
            response = await http.post(ask.path, json=ask.body, headers=headers)
    except TimeoutError:
        tally.ended["left"] += 1
        return
    for event in _events(response):
        error = event.get("error")
        if error is not None:
            tally.ended[str(error["code"])] += 1
            if not _may_end(ask, error):
                tally.faults.append(f"{error}: {ask.body}")
            return
        for choice in event["choices"]:
            tally.tokens += len(choice.get("token_ids") or [])
            if choice["finish_reason"]:
                tally.ended[choice["finish_reason"]] += 1


def _may_end(ask: Ask, error: dict[str, Any]) -> bool:
    """Its deadline may pass; and that one so short will, may be known before anything is begun."""
    if ask.timeout_s is None:
        return False
    refused = error["code"] == "overloaded" and "before its deadline" in error["message"]
    return error["code"] == "deadline_exceeded" or (refused and ask.timeout_s < 1)


def _events(response: httpx.Response) -> list[dict[str, Any]]:
    if not response.headers["content-type"].startswith("text/event-stream"):
        return [response.json()]
    lines = response.text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
