"""``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from baton.router.api.http.anthropic.writer import MessageWriter
from baton.router.api.http.openai.single import answer_single
from baton.router.api.http.openai.tokens import answer_document
from baton.router.api.http.server.anthropic_errors import ENDPOINT
from baton.router.api.http.server.jobs import read_job


async def create(request: Request) -> Response:
    """Answer one request."""
    asked = await read_job(request, "message", ENDPOINT, id_prefix="msg_")
    return await answer_single(request, asked, MessageWriter(asked.job))


async def count(request: Request) -> Response:
    """Count the tokens of a conversation's prompt, which may be longer than the context."""
    return await answer_document(request, "count")
