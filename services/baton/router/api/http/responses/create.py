"""``POST /v1/responses``."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response

from baton.router.api.catalogue import Catalogue
from baton.router.api.http.authentication import client_of
from baton.router.api.http.body import read_request
from baton.router.api.http.chat import ChatJobs
from baton.router.api.http.envelope import request_id_of
from baton.router.api.http.renaming import renaming
from baton.router.api.http.responses.fields import ResponseRequest, check_refused
from baton.router.api.http.responses.input import chat_of
from baton.router.api.http.responses.writer import ResponseWriter
from baton.router.api.http.single import answer_single
from baton.router.api.http.thinking import Thinking
from baton.router.api.service import CompletionService, Job

ENDPOINT = "/v1/responses"


class Responses:
    """Answers requests for responses. Each is answered from itself alone: nothing is kept."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._settings = catalogue.settings
        self._jobs = catalogue.each(_ResponseJobs)

    async def create(self, request: Request) -> Response:
        """Answer one request."""
        started = time.perf_counter()
        self._catalogue.check_room(client_of(request))
        body = await read_request(request, ResponseRequest, self._settings)
        check_refused(body)
        jobs = self._jobs.of(body.model)
        job = await jobs.job(request, body, started)
        return await answer_single(
            jobs.service, request, job, ResponseWriter(job, body), stream=bool(body.stream)
        )


class _ResponseJobs:
    """Turns the requests for one model into jobs."""

    def __init__(self, service: CompletionService) -> None:
        self.service = service
        self._chats = ChatJobs(service)
        self._thinking = Thinking(service, self._chats.calls)

    async def job(self, request: Request, body: ResponseRequest, started: float) -> Job:
        effort = None if body.reasoning is None else body.reasoning.effort
        template = {} if effort is None else self._thinking.graded(effort, "reasoning.effort")
        chat = chat_of(body, template)
        with renaming(chat.names):
            return await self._chats.job(
                request,
                chat.body,
                request_id=f"resp_{request_id_of(request)}",
                endpoint=ENDPOINT,
                started=started,
            )
