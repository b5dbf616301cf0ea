"""``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

from __future__ import annotations

import time

import orjson
from starlette.requests import Request
from starlette.responses import Response

from baton.router.api.catalogue import Catalogue
from baton.router.api.errors import invalid, shown
from baton.router.api.http.authentication import client_of
from baton.router.api.http.body import read_request
from baton.router.api.http.chat import ChatJobs
from baton.router.api.http.envelope import request_id_of
from baton.router.api.http.messages.errors import ENDPOINT
from baton.router.api.http.messages.fields import (
    CountRequest,
    MessageRequest,
    ThinkingOptions,
    check_refused,
)
from baton.router.api.http.messages.input import chat_of
from baton.router.api.http.messages.writer import MessageWriter
from baton.router.api.http.renaming import renaming
from baton.router.api.http.single import answer_single
from baton.router.api.http.thinking import Thinking
from baton.router.api.service import CompletionService, Job
from baton.text.config import Json

LEAST_BUDGET = 1024
TOOL_NAME_CHARS = 128
"""Of a tool's name, at most. Tools of MCP servers have long ones."""


class Messages:
    """Goes on with conversations, and counts their tokens."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._settings = catalogue.settings
        self._jobs = catalogue.each(_MessageJobs)

    async def create(self, request: Request) -> Response:
        """Answer one request."""
        started = time.perf_counter()
        self._catalogue.check_room(client_of(request))
        body = await read_request(request, MessageRequest, self._settings)
        check_refused(body)
        jobs = self._jobs.of(body.model)
        job = await jobs.job(request, body, started)
        return await answer_single(jobs.service, request, job, MessageWriter(job), stream=bool(body.stream))

    async def count(self, request: Request) -> Response:
        """How many tokens the prompt of a conversation has. It may be longer than the context."""
        body = await read_request(request, CountRequest, self._settings)
        check_refused(body)
        count = await self._jobs.of(body.model).count(request, body)
        return Response(orjson.dumps({"input_tokens": count}), media_type="application/json")


class _MessageJobs:
    """Turns the requests for one model into jobs."""

    def __init__(self, service: CompletionService) -> None:
        self.service = service
        self._chats = ChatJobs(service, TOOL_NAME_CHARS)
        self._thinking = Thinking(service, self._chats.calls)

    async def job(self, request: Request, body: MessageRequest, started: float) -> Job:
        chat = chat_of(body, self._template(body))
        _check_budget(body)
        with renaming(chat.names):
            return await self._chats.job(
                request,
                chat.body,
                request_id=f"msg_{request_id_of(request)}",
                endpoint=ENDPOINT,
                started=started,
            )

    async def count(self, request: Request, body: CountRequest) -> int:
        chat = chat_of(body, self._template(body))
        with renaming(chat.names):
            self.service.model(body.model, client_of(request))
            return await self._chats.count(chat.body)

    def _template(self, body: CountRequest) -> dict[str, Json]:
        switch = self._switch(body.thinking)
        effort = None if body.output_config is None else body.output_config.effort
        return switch if effort is None else {**switch, **self._thinking.wished(effort)}

    def _switch(self, thinking: ThinkingOptions | None) -> dict[str, Json]:
        if thinking is None:
            return self._thinking.usually_off()
        match thinking.type:
            case "adaptive":
                return self._thinking.if_able()
            case "enabled":
                return self._thinking.switched(True, "thinking.type")
            case "disabled":
                return self._thinking.switched(False, "thinking.type")
        raise invalid(
            "thinking.type",
            f"thinking.type must be enabled, adaptive or disabled, not {shown(thinking.type)}.",
        )


def _check_budget(body: MessageRequest) -> None:
    """Raise RequestError for a budget that Anthropic does not take. It is a wish: a model reasons until
    it is done or ``max_tokens`` is used up."""
    thinking = body.thinking
    if thinking is None or thinking.type != "enabled":
        return
    budget = thinking.budget_tokens
    if budget is None:
        raise invalid(
            "thinking.budget_tokens", "thinking.budget_tokens is required.", "missing_required_parameter"
        )
    if not LEAST_BUDGET <= budget < body.max_tokens:
        raise invalid(
            "thinking.budget_tokens",
            f"thinking.budget_tokens must be at least {LEAST_BUDGET} and less than max_tokens "
            f"({shown(body.max_tokens)}), not {shown(budget)}.",
        )
