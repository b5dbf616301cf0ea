"""``POST /v1/responses``."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from baton.router.api.http.openai.single import answer_single
from baton.router.api.http.responses.writer import ResponseWriter
from baton.router.api.http.server.jobs import read_job

ENDPOINT = "/v1/responses"


async def create(request: Request) -> Response:
    """Answer one request."""  # from the request alone: no response is stored
    asked = await read_job(request, "response", ENDPOINT, id_prefix="resp_", told_prefix="")
    assert asked.prepared.repeated is not None
    return await answer_single(request, asked, ResponseWriter(asked.job, asked.prepared.repeated))
