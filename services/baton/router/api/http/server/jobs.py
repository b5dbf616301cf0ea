"""The building of the job that answers an HTTP request, for every protocol."""

from __future__ import annotations

import time
from typing import NamedTuple

from starlette.requests import Request

from baton.router.api.http.server.authentication import client_of
from baton.router.api.http.server.body import prepared_job
from baton.router.api.http.server.envelope import arrival_of, name_request
from baton.router.api.http.server.served import api_of
from baton.router.api.http.server.timeout import TIMEOUT_HEADER, timeout_of
from baton.router.api.job import Job
from baton.router.api.job_builder import Requester, build_job
from baton.router.api.prepared import Endpoint, PreparedJob
from baton.router.api.service import CompletionService


class ReadJob(NamedTuple):
    """A job, and how its client wants to be answered."""

    service: CompletionService
    """The service of the model that is asked."""
    job: Job
    prepared: PreparedJob


async def read_job(
    request: Request, body: Endpoint, endpoint: str, *, id_prefix: str, told_prefix: str | None = None
) -> ReadJob:
    """Return the job that answers ``request``, whose body is one for ``body``. The answer's id begins with
    ``id_prefix``; an id of the client's own with ``told_prefix``, which is the same by default.

    Raises RequestError and ApiError; see `prepared_job` and `build_job`.
    """
    started = time.perf_counter()
    api, client = api_of(request), client_of(request)
    api.catalogue.check_room(client)
    prepared = await prepared_job(request, body, client, api)
    service = api.catalogue.services[prepared.model]
    told_id = ""
    if prepared.client_id is not None:
        name_request(request, prepared.client_id)
        told_id = (id_prefix if told_prefix is None else told_prefix) + prepared.client_id
    minted, origin, record = arrival_of(request)
    requester = Requester(
        request_id=id_prefix + minted,
        told_id=told_id,
        endpoint=endpoint,
        started=started,
        client=client,
        origin=origin,
        record=record,
        timeout_s=timeout_of(request),
        timeout_param=TIMEOUT_HEADER,
    )
    format_ = None if prepared.format is None else api.reading.format_of(prepared)
    return ReadJob(service, await build_job(service, prepared, requester, format_), prepared)
