"""``POST /tokenize`` and ``POST /detokenize``."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from baton.router.api.catalogue import Catalogue
from baton.router.api.counted import counted
from baton.router.api.http.authentication import client_of
from baton.router.api.http.body import read_document
from baton.router.api.prepared import Endpoint
from baton.router.api.reading import Reading


class Tokens:
    """The tokenizer, for clients."""

    def __init__(self, catalogue: Catalogue, reading: Reading) -> None:
        self._catalogue = catalogue
        self._reading = reading

    async def tokenize(self, request: Request) -> Response:
        """The tokens of a text, or of the prompt that messages make."""
        return await self._answer(request, "tokenize")

    async def detokenize(self, request: Request) -> Response:
        """The text of tokens, special ones included."""
        return await self._answer(request, "detokenize")

    async def _answer(self, request: Request, endpoint: Endpoint) -> Response:
        async with counted(self._catalogue, client_of(request)) as headers:
            content = await read_document(request, endpoint, self._reading, self._catalogue.settings)
        return Response(content, media_type="application/json", headers=dict(headers))
