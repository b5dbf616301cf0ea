"""``POST /v1/completions``."""

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


class Completions:
    """Completes prompts given as text or token ids."""

    def __init__(self, catalogue: Catalogue, reading: Reading) -> None:
        self._catalogue = catalogue
        self._reading = reading
        self._answerers = [Answerer(service, chat=False) for service in catalogue.services]

    async def create(self, request: Request) -> Response:
        """Complete the prompts of one request."""
        started = time.perf_counter()
        self._catalogue.check_room(client_of(request))
        prepared = await read_job(request, "completion", self._reading, self._catalogue.settings)
        job = await job_of(
            self._catalogue.services[prepared.model],
            request,
            prepared,
            request_id=f"cmpl-{request_id_of(request)}",
            endpoint="/v1/completions",
            started=started,
        )
        return await self._answerers[prepared.model].answer(request, job, prepared.telling)
