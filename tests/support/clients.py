"""Small HTTP clients for end-to-end tests: token ids in, token ids out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import httpx


@dataclass
class Answer:
    """One completion. Times are seconds from sending the request."""

    token_ids: list[int]
    text: str = ""
    finish_reason: str | None = None
    cached_tokens: int = 0
    arrivals: list[float] = field(default_factory=list)
    """When each streamed chunk came."""


class RingClient:
    """Asks ``/v1/completions`` with token ids."""

    def __init__(self, url: str, model: str) -> None:
        self.model = model
        self.http = httpx.AsyncClient(
            base_url=url,
            timeout=120,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
        )

    async def __aenter__(self) -> RingClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()

    def body(self, prompt: Sequence[int] | str, **fields: object) -> dict[str, object]:
        text = prompt if isinstance(prompt, str) else list(prompt)
        return {"model": self.model, "prompt": text, "return_token_ids": True, "ignore_eos": True, **fields}

    async def complete(self, prompt: Sequence[int] | str, **fields: object) -> Answer:
        """One answer, not streamed. Raises httpx.HTTPStatusError."""
        response = await self.http.post("/v1/completions", json=self.body(prompt, **fields))
        if response.is_error:
            raise httpx.HTTPStatusError(response.text, request=response.request, response=response)
        body = response.json()
        choice = body["choices"][0]
        cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
        return Answer(choice["token_ids"], choice["text"], choice["finish_reason"], cached)

    async def stream(self, prompt: Sequence[int] | str, **fields: object) -> Answer:
        """One answer, streamed, with the time of each chunk. Raises RuntimeError on an error event."""
        answer = Answer([])
        clock = asyncio.get_running_loop().time
        began = clock()
        usage = {"include_usage": True}
        body = self.body(prompt, stream=True, stream_options=usage, **fields)
        async with self.http.stream("POST", "/v1/completions", json=body) as response:
            if response.is_error:
                await response.aread()
                raise httpx.HTTPStatusError(response.text, request=response.request, response=response)
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    self._take(answer, json.loads(line[6:]), clock() - began)
        return answer

    @staticmethod
    def _take(answer: Answer, event: dict[str, object], at: float) -> None:
        if "error" in event:
            raise RuntimeError(str(event["error"]))
        for choice in cast(list[dict[str, object]], event["choices"]):
            token_ids = cast(list[int], choice.get("token_ids") or [])
            answer.token_ids += token_ids
            answer.text += cast(str, choice["text"])
            if token_ids:
                answer.arrivals.append(at)
            answer.finish_reason = cast("str | None", choice["finish_reason"]) or answer.finish_reason
        usage = cast("dict[str, dict[str, int]] | None", event.get("usage"))
        if usage:
            answer.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
