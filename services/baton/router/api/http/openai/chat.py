"""``POST /v1/chat/completions``."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from baton.router.api.http.openai.answer import answer_choices
from baton.router.api.http.server.jobs import read_job

ENDPOINT = "/v1/chat/completions"


async def create(request: Request) -> Response:
    """Answer one chat."""
    asked = await read_job(request, "chat", ENDPOINT, id_prefix="chatcmpl-")
    return await answer_choices(request, asked, chat=True)
