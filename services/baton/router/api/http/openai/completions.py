"""``POST /v1/completions``."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from baton.router.api.http.openai.answer import answer_choices
from baton.router.api.http.server.jobs import read_job

ENDPOINT = "/v1/completions"


async def create(request: Request) -> Response:
    """Complete the prompts of one request."""
    asked = await read_job(request, "completion", ENDPOINT, id_prefix="cmpl-")
    return await answer_choices(request, asked, chat=False)
