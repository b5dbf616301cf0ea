"""``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response

from baton.router.api.catalogue import Catalogue
from baton.router.api.counted import counted
from baton.router.api.http.authentication import client_of
from baton.router.api.http.body import read_document, read_job
from baton.router.api.http.envelope import request_id_of
from baton.router.api.http.jobs import job_of
from baton.router.api.http.messages.errors import ENDPOINT
from baton.router.api.http.messages.writer import MessageWriter
from baton.router.api.http.single import answer_single
from baton.router.api.reading import Reading


class Messages:
    """Goes on with conversations, and counts their tokens."""

    def __init__(self, catalogue: Catalogue, reading: Reading) -> None:
        self._catalogue = catalogue
        self._reading = reading

    async def create(self, request: Request) -> Response:
        """Answer one request."""
        started = time.perf_counter()
        self._catalogue.check_room(client_of(request))
        prepared = await read_job(request, "message", self._reading, self._catalogue.settings)
        service = self._catalogue.services[prepared.model]
        job = await job_of(
            service,
            request,
            prepared,
            request_id=f"msg_{request_id_of(request)}",
            endpoint=ENDPOINT,
            started=started,
            format_=self._reading.format_of(prepared),
        )
        return await answer_single(service, request, job, MessageWriter(job), stream=prepared.telling.stream)

    async def count(self, request: Request) -> Response:
        """How many tokens the prompt of a conversation has. It may be longer than the context."""
        async with counted(self._catalogue, client_of(request)) as headers:
            content = await read_document(request, "count", self._reading, self._catalogue.settings)
        return Response(content, media_type="application/json", headers=dict(headers))
