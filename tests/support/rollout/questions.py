"""Requests of all kinds that simulated workers answer, and what came back."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import grpc
import httpx

from baton.v1 import inference_pb2, inference_pb2_grpc

KINDS: Mapping[str, float] = MappingProxyType(
    {
        "stream": 4,
        "sampled": 3,
        "several": 2,
        "whole": 2,
        "chat": 2,
        "grpc": 3,
        "long": 2,
        "slow": 1,
        "leaving": 1,
    }
)
"""How often each is asked, beside the others. sampled: at a temperature, with a seed; several: two answers to
a prompt; whole: not streamed; long: a prompt of many chunks; slow: a client that reads slowly; leaving: one
that goes in the middle."""
VOCABULARY = 4096
"""Ids that prompts are made of are below; it is no more than the demo model's."""
MAX_S = 120.0
SLOW_S = 0.03
"""A slow client's pause after each event."""


@dataclass(frozen=True, slots=True)
class Question:
    kind: str
    prompt: tuple[int, ...]
    """Empty: it is a chat."""
    text: str
    length: int
    seed: int
    """0: decoded greedily."""
    leave_after: int | None = None

    @classmethod
    def draw(cls, rng: random.Random, longest: int) -> Question:
        """``longest``: tokens of an answer."""
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
        size = rng.randint(1200, 2400) if kind == "long" else rng.choice((8, 60, 300))
        length = rng.randint(longest // 8, longest)
        return cls(
            kind,
            () if kind == "chat" else tuple(rng.randrange(VOCABULARY) for _ in range(size)),
            " ".join("".join(rng.choices("abcdefghij", k=rng.randint(2, 7))) for _ in range(40)),
            length,
            rng.getrandbits(40) + 1 if kind in ("sampled", "several") else 0,
            rng.randint(1, length) if kind == "leaving" else None,
        )

    @property
    def streamed(self) -> bool:
        return self.kind != "whole"

    @property
    def choices(self) -> int:
        return 2 if self.kind == "several" else 1

    def body(self) -> dict[str, Any]:
        asked: dict[str, Any] = {
            "model": "demo",
            "max_tokens": self.length,
            "temperature": 1 if self.seed else 0,
            "n": self.choices,
            "ignore_eos": True,
            "stream": self.streamed,
            "return_token_ids": True,
        }
        if self.seed:
            asked["seed"] = self.seed
        if self.prompt:
            return {**asked, "prompt": list(self.prompt)}
        return {**asked, "messages": [{"role": "user", "content": self.text}]}


@dataclass(slots=True)
class Reply:
    """What came, and when, by ``time.monotonic``."""

    question: Question
    asked: float
    stage: str = ""
    """What was done to the ring when it was asked."""
    prompt: tuple[int, ...] = ()
    tokens: dict[int, list[int]] = field(default_factory=dict)
    """By choice."""
    arrivals: dict[int, list[float]] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    left: bool = False
    failure: str | None = None

    def take(self, index: int, token_ids: list[int], finished: bool) -> None:
        self.tokens.setdefault(index, []).extend(token_ids)
        if token_ids:
            self.arrivals.setdefault(index, []).append(time.monotonic())
        if finished:
            self.finished.add(index)


class Client:
    """Of one router, over HTTP and gRPC."""

    def __init__(self, http: str, grpc_address: str) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._http = httpx.AsyncClient(base_url=http, timeout=None, limits=limits)
        self._channel = grpc.aio.insecure_channel(grpc_address)

    async def close(self) -> None:
        await self._http.aclose()
        await self._channel.close(None)

    async def ask(self, question: Question, stage: Callable[[], str]) -> Reply:
        """The reply, however it ends."""
        reply = Reply(question, time.monotonic(), stage(), question.prompt)
        try:
            async with asyncio.timeout(MAX_S):
                if question.kind == "grpc":
                    await self._call(question, reply)
                else:
                    await self._post(question, reply)
        except TimeoutError:
            reply.failure = f"not answered within {MAX_S:.0f} s"
        except (httpx.HTTPError, OSError) as error:
            reply.failure = f"the connection to the router broke: {error!r}"
        except grpc.aio.AioRpcError as error:
            reply.failure = f"{error.code().name}: {error.details()}"
        return reply

    async def _post(self, question: Question, reply: Reply) -> None:
        path = "/v1/completions" if question.prompt else "/v1/chat/completions"
        async with self._http.stream("POST", path, json=question.body()) as answer:
            if answer.status_code != 200:
                reply.failure = f"{answer.status_code}: {(await answer.aread()).decode()[:300]}"
            elif not question.streamed:
                _take(reply, json.loads(await answer.aread()))
            else:
                await self._read(question, reply, answer)

    async def _read(self, question: Question, reply: Reply, answer: httpx.Response) -> None:
        async for line in answer.aiter_lines():
            if line == "data: [DONE]" or not line.startswith("data: "):
                continue
            _take(reply, json.loads(line[6:]))
            if reply.failure is not None:
                return
            if question.leave_after is not None and len(reply.tokens.get(0, ())) >= question.leave_after:
                reply.left = True
                return
            if question.kind == "slow":
                await asyncio.sleep(SLOW_S)

    async def _call(self, question: Question, reply: Reply) -> None:
        params = inference_pb2.SamplingParams(max_tokens=question.length, temperature=0, ignore_eos=True)
        request = inference_pb2.GenerateRequest(model="demo", params=params)
        request.token_ids.ids.extend(question.prompt)
        async for each in inference_pb2_grpc.InferenceStub(self._channel).Generate(request):
            reply.take(0, list(each.token_ids), bool(each.finish_reason))


def _take(reply: Reply, event: Mapping[str, Any]) -> None:
    """A document, or an event of a stream."""
    if "error" in event:
        reply.failure = json.dumps(event["error"])[:300]
        return
    reply.prompt = tuple(event.get("prompt_token_ids") or reply.prompt)
    for choice in event["choices"]:
        reply.take(choice["index"], choice.get("token_ids") or [], choice["finish_reason"] is not None)
