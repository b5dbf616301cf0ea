"""A client that keeps what it was given, whatever became of the request, and can leave in the middle."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import httpx

if TYPE_CHECKING:
    from tests.support.chaos.catalogue import Question

DEADLINE_S = 90.0
"""The longest that a request may take; they take a second or two where nothing is slowed down."""
NAMED = frozenset({"worker_lost", "worker_error", "no_worker", "not_ready"})
"""The error codes that tell of a lost worker, as they should."""


@dataclass
class Reply:
    """What came back. An answer is whole (``finish_reason``), failed (``failure``: why), or was left."""

    token_ids: list[int] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    failure: str | None = None
    code: str | None = None
    """The error's name, if it has one."""
    opened: bool = False
    """The status line said 200."""


class ChaosClient:
    """Asks questions of a router over HTTP."""

    def __init__(self, url: str, model: str, deadline_s: float = DEADLINE_S) -> None:
        self._model = model
        self._deadline_s = deadline_s
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._http = httpx.AsyncClient(base_url=url, timeout=None, limits=limits)

    async def __aenter__(self) -> ChaosClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def ask(
        self,
        question: Question,
        *,
        stream: bool,
        reply: Reply | None = None,
        on_sent: Callable[[], None] = lambda: None,
        on_tokens: Callable[[Reply], bool] = lambda _: True,
    ) -> Reply:
        """The reply, however it ends. ``on_sent`` is called once the request is on its way, ``on_tokens`` at
        each delivery; False leaves at once. Given a ``reply``, that is filled, so that it can be looked at
        when the caller cancels."""
        reply = reply or Reply()

        async def trace(event: str, _: object) -> None:
            if event == "http11.send_request_body.complete":
                on_sent()

        body = {
            "model": self._model,
            "return_token_ids": True,
            "ignore_eos": True,
            "stream": stream,
            **question.body,
        }
        path = "/v1/chat/completions" if question.chat else "/v1/completions"
        request = self._http.stream("POST", path, json=body, extensions={"trace": trace})
        try:
            async with asyncio.timeout(self._deadline_s), request as response:
                reply.opened = response.status_code == 200
                if stream and reply.opened:
                    await self._read_events(response, reply, on_tokens)
                else:
                    self._read_document(reply, response.status_code, await response.aread())
        except TimeoutError:
            reply.failure = f"nothing came for {self._deadline_s:.0f} s: the request hangs"
        except httpx.HTTPError as error:
            reply.failure = f"the connection to the router broke: {error!r}"
        return reply

    async def _read_events(
        self, response: httpx.Response, reply: Reply, on_tokens: Callable[[Reply], bool]
    ) -> None:
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                if reply.finish_reason is None and reply.failure is None:
                    reply.failure = "the stream ended without a finish reason or an error"
                return
            if line.startswith("data: "):
                self._take(reply, json.loads(line[6:]))
                if not on_tokens(reply):
                    return
        reply.failure = "the stream broke off without [DONE]"

    def _read_document(self, reply: Reply, status: int, body: bytes) -> None:
        document = json.loads(body)
        self._take(reply, document)
        if status == 200 and reply.finish_reason is None:
            reply.failure = "status 200 without a finish reason"
        if status not in (200, 503):
            reply.code, reply.failure = None, f"status {status}: {body.decode()}"

    @staticmethod
    def _take(reply: Reply, event: dict[str, object]) -> None:
        error = cast("dict[str, str] | None", event.get("error"))
        if error is not None:
            reply.code, reply.failure = error["code"], f"{error['code']}: {error['message']}"
            return
        for choice in cast(list[dict[str, object]], event["choices"]):
            reply.token_ids += cast(list[int], choice.get("token_ids") or [])
            prompt = choice.get("prompt_token_ids") or event.get("prompt_token_ids") or []
            reply.prompt_ids += cast(list[int], prompt)
            reply.finish_reason = cast("str | None", choice.get("finish_reason")) or reply.finish_reason


def verdict(question: Question, reply: Reply) -> str | None:
    """What is wrong with a reply, or None. Whole or failed by name: either is right, and every token that was
    delivered must be the true one."""
    given = tuple(reply.token_ids)
    if given != question.answer[: len(given)]:
        return "wrong tokens"
    if reply.failure is not None:
        return None if reply.code in NAMED else reply.failure
    if reply.finish_reason is not None and given != question.answer:
        return "a whole answer that is not the whole answer"
    if reply.finish_reason not in (None, "length"):
        return f"finish reason {reply.finish_reason}"
    return None
