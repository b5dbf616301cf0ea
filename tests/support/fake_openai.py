"""An OpenAI-compatible server that streams on a schedule, and notes when."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse


@dataclass
class Call:
    """One request, and when its parts were sent, on the clock of ``time.perf_counter``."""

    body: dict[str, object]
    came: float
    chunks: list[float] = field(default_factory=list)


@dataclass
class FakeServer:
    """Answers with chunks of so many tokens, each so many seconds after the one before."""

    schedule: list[tuple[float, int]] = field(default_factory=lambda: [(0.0, 1)])
    token_ids: bool = True
    """Whether it tells the ids of each chunk; otherwise it refuses to be asked."""
    takes_ids: bool = True
    usage: bool = True
    fault: str | None = None
    """refuse, event, cut, empty, hang or garbage: what the answers to all but the first request are."""
    calls: list[Call] = field(default_factory=list)
    open: int = 0
    max_open: int = 0

    def app(self) -> FastAPI:
        app = FastAPI()
        app.add_api_route("/v1/models", self.models, response_model=None)
        app.add_api_route("/v1/completions", self.complete, methods=["POST"], response_model=None)
        return app

    async def models(self) -> Response:
        return JSONResponse({"data": [{"id": "demo", "max_model_len": 4096}]})

    async def complete(self, request: Request) -> Response:
        body = json.loads(await request.body())
        if "return_token_ids" in body and not self.token_ids:
            return JSONResponse({"error": {"message": "return_token_ids is unknown"}}, 400)
        if not isinstance(body["prompt"], str) and not self.takes_ids:
            return JSONResponse({"error": {"message": "prompt must be a text"}}, 400)
        self.calls.append(Call(body, time.perf_counter()))
        fault = self.fault if len(self.calls) > 1 else None
        if fault == "refuse":
            return JSONResponse({"error": {"message": "too many"}}, 429)
        return StreamingResponse(self._events(self.calls[-1], fault), media_type="text/event-stream")

    async def _events(self, call: Call, fault: str | None) -> AsyncIterator[bytes]:
        self.open += 1
        self.max_open = max(self.open, self.max_open)
        try:
            async for event in self._answer(call, fault):
                yield event
        finally:
            self.open -= 1

    async def _answer(self, call: Call, fault: str | None) -> AsyncIterator[bytes]:
        yield b": a comment\n\n"
        if fault == "hang":
            await asyncio.sleep(60)
        if fault == "event":
            yield b'data: {"error": {"message": "no room", "code": "overloaded"}}\n\n'
            return
        if fault == "garbage":
            yield b"data: {]\n\n"
        for pause, tokens in self.schedule if fault != "empty" else ():
            await asyncio.sleep(pause)
            call.chunks.append(time.perf_counter())
            choice: dict[str, object] = {"index": 0, "text": "x" * tokens, "finish_reason": None}
            if self.token_ids:
                choice["token_ids"] = [1] * tokens
            # In two pieces, as a network may cut it.
            event = f"data: {json.dumps({'choices': [choice]})}\r\n\r\n".encode()
            yield event[:9]
            yield event[9:]
        if fault == "cut":
            return
        if self.usage:
            total = sum(tokens for _, tokens in self.schedule)
            usage = {"prompt_tokens": 77, "completion_tokens": total}
            yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode()
        yield b"data: [DONE]\n\n"
