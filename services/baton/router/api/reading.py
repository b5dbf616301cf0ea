"""The reading of bodies without blocking the event loop: small ones on it, large ones and chats in another
process.

A chat template is a program of whoever made the model: how long it takes says nothing about the body. So it
is never rendered on the event loop.
"""

from __future__ import annotations

import array

import msgspec

from baton.request.truncation import Truncation
from baton.router.api.catalogue import Catalogue
from baton.router.api.prepared import CHATS, ID_TYPE, Assignment, Document, Endpoint, PreparedJob
from baton.router.api.prompts import NotHereError
from baton.router.api.readers import HereReader
from baton.router.security.client import Client
from baton.tools.answer import AnswerFormat

INLINE_BYTES = 16 * 1024
"""The most bytes of a body that is read on the event loop, and the most characters of its texts: the time
that the slowest tokenizers take for them (28 ms, for digits only) is not worth a process."""


class Reading:
    """Reads the bodies of requests, where their size allows."""

    def __init__(self, catalogue: Catalogue, here: HereReader) -> None:
        self._catalogue = catalogue
        self._elsewhere = catalogue.elsewhere
        self._here = here

    async def job(self, endpoint: Endpoint, body: bytes, client: Client) -> PreparedJob:
        """Return the request for tokens that ``body`` holds. Raises RequestError and ApiError."""
        found = await self._prepare(endpoint, body, client)
        assert isinstance(found, PreparedJob)
        return found

    async def document(self, endpoint: Endpoint, body: bytes, client: Client) -> Document:
        """Return the answer to ``body``, for which nothing is generated. Raises RequestError and ApiError."""
        found = await self._prepare(endpoint, body, client)
        assert isinstance(found, Document)
        return found

    def format_of(self, prepared: PreparedJob) -> AnswerFormat | None:
        """Return how the answers to a chat are parsed; None: as content alone."""
        return self._here.format_of(prepared)

    async def text(
        self, text: str, model: str | None, client: Client, truncation: Truncation | None = None
    ) -> list[int]:
        """Return the ids of a prompt that came without a body, cut if ``truncation`` says so. Raises
        RequestError, which names the field ``text``, and ApiError."""
        body = msgspec.json.encode({"model": model, "text": text, "truncation": truncation})
        ids = array.array(ID_TYPE)
        ids.frombytes((await self.document("text", body, client)).content)
        return ids.tolist()

    async def _prepare(self, endpoint: Endpoint, body: bytes, client: Client) -> PreparedJob | Document:
        assignment = Assignment(endpoint, self._catalogue.menu(client))
        if self._elsewhere is None:
            return self._here.prepare(assignment, body)
        if len(body) <= INLINE_BYTES and endpoint not in CHATS:
            try:
                return self._here.prepare(assignment, body)
            except NotHereError:  # it has messages for a template, or makes a long text of few bytes
                pass
        return await self._elsewhere.prepare(client.tenant, assignment, body)
