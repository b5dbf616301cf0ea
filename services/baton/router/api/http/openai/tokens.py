"""``POST /tokenize`` and ``POST /detokenize``, and other requests that are answered without generating
anything."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from baton.router.api.admission import counted
from baton.router.api.http.server.authentication import client_of
from baton.router.api.http.server.body import read_document
from baton.router.api.http.server.served import api_of
from baton.router.api.ignored import ignored_header
from baton.router.api.prepared import Endpoint


async def tokenize(request: Request) -> Response:
    """Tokenize a text, or the prompt that messages make."""
    return await answer_document(request, "tokenize")


async def detokenize(request: Request) -> Response:
    """Return the text of tokens, special tokens included."""
    return await answer_document(request, "detokenize")


async def answer_document(request: Request, body: Endpoint) -> Response:
    """Return the answer that a body for ``body`` alone makes. The request counts towards its tenant's limits,
    except for those of tokens."""
    api, client = api_of(request), client_of(request)
    async with counted(api.catalogue.shared, client.tenant) as headers:
        document = await read_document(request, body, client, api)
    told = {**headers, **ignored_header(document.ignored)}
    return Response(document.content, media_type="application/json", headers=told)
