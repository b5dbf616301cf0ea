"""``POST /v1/responses``."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response

from baton.router.api.catalogue import Catalogue
from baton.router.api.http.authentication import client_of
from baton.router.api.http.body import read_job
from baton.router.api.http.envelope import request_id_of
from baton.router.api.http.jobs import job_of
from baton.router.api.http.responses.writer import ResponseWriter
from baton.router.api.http.single import answer_single
from baton.router.api.reading import Reading

ENDPOINT = "/v1/responses"


class Responses:
    """Answers requests for responses. Each is answered from itself alone: nothing is kept."""

    def __init__(self, catalogue: Catalogue, reading: Reading) -> None:
        self._catalogue = catalogue
        self._reading = reading

    async def create(self, request: Request) -> Response:
        """Answer one request."""
        started = time.perf_counter()
        self._catalogue.check_room(client_of(request))
        prepared = await read_job(request, "response", self._reading, self._catalogue.settings)
        assert prepared.repeated is not None
        service = self._catalogue.services[prepared.model]
        job = await job_of(
            service,
            request,
            prepared,
            request_id=f"resp_{request_id_of(request)}",
            endpoint=ENDPOINT,
            started=started,
            format_=self._reading.format_of(prepared),
        )
        writer = ResponseWriter(job, prepared.repeated)
        return await answer_single(service, request, job, writer, stream=prepared.telling.stream)
