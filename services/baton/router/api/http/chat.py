"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response

from baton.router.api.catalogue import Catalogue
from baton.router.api.http.answer import Answerer
from baton.router.api.http.authentication import client_of
from baton.router.api.http.body import read_job
from baton.router.api.http.envelope import request_id_of
from baton.router.api.http.jobs import job_of
from baton.router.api.reading import Reading


class ChatCompletions:
    """Answers chats, through the model's chat template."""

    def __init__(self, catalogue: Catalogue, reading: Reading) -> None:
        self._catalogue = catalogue
        self._reading = reading
        self._answerers = [Answerer(service, chat=True) for service in catalogue.services]

    async def create(self, request: Request) -> Response:
        """Answer one chat."""
        started = time.perf_counter()
        self._catalogue.check_room(client_of(request))
        prepared = await read_job(request, "chat", self._reading, self._catalogue.settings)
        job = await job_of(
            self._catalogue.services[prepared.model],
            request,
            prepared,
            request_id=f"chatcmpl-{request_id_of(request)}",
            endpoint="/v1/chat/completions",
            started=started,
            format_=self._reading.format_of(prepared),
        )
        return await self._answerers[prepared.model].answer(request, job, prepared.telling)
