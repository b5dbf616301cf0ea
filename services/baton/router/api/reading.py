"""Reading bodies without holding up anybody: small ones at once, large ones in another process."""

from __future__ import annotations

import array

import msgspec

from baton.router.api.catalogue import Catalogue
from baton.router.api.http.preparing.prepare import BodyReader, ModelPreparers
from baton.router.api.prepared import ID_TYPE, Assignment, Document, Endpoint, PreparedJob
from baton.router.api.prompts import TooMuchHereError
from baton.router.security.client import Client
from baton.tools.answer import AnswerFormat

INLINE_BYTES = 16 * 1024
"""Bodies up to here are read on the event loop, with texts of so many characters: what the slowest tokenizers
take for them (28 ms for nothing but digits) is not worth a process."""


class Reading:
    """From the bodies of requests to what they ask for."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._elsewhere = catalogue.elsewhere
        self._models = [ModelPreparers.of(each.tokenizer, each.settings) for each in catalogue.services]
        self._here = BodyReader(
            self._models.__getitem__,
            ignore_unknown=catalogue.settings.ignore_unknown_fields,
            most_chars=None if self._elsewhere is None else INLINE_BYTES,
        )

    async def job(self, endpoint: Endpoint, body: bytes, client: Client | None) -> PreparedJob:
        """The request for tokens that ``body`` is. Raises RequestError and ApiError."""
        found = await self._prepare(endpoint, body, client)
        assert isinstance(found, PreparedJob)
        return found

    async def document(self, endpoint: Endpoint, body: bytes, client: Client | None) -> bytes:
        """The answer to ``body``, for which nothing is generated. Raises RequestError and ApiError."""
        found = await self._prepare(endpoint, body, client)
        assert isinstance(found, Document)
        return found.content

    def format_of(self, prepared: PreparedJob) -> AnswerFormat | None:
        """How the answers to a chat are parsed."""
        return self._models[prepared.model].chats.calls.format_of(prepared.format)

    async def text(self, text: str, model: str | None, client: Client) -> list[int]:
        """The ids of a prompt that came without a body. Raises RequestError, by the name ``text``, and
        ApiError."""
        body = msgspec.json.encode({"model": model, "text": text})
        ids = array.array(ID_TYPE)
        ids.frombytes(await self.document("text", body, client))
        return ids.tolist()

    async def _prepare(
        self, endpoint: Endpoint, body: bytes, client: Client | None
    ) -> PreparedJob | Document:
        assignment = Assignment(endpoint, self._catalogue.menu(client))
        if self._elsewhere is None:
            return self._here.prepare(assignment, body)
        if len(body) <= INLINE_BYTES:
            try:
                return self._here.prepare(assignment, body)
            except TooMuchHereError:  # a template has made much of little
                pass
        tenant = self._catalogue.authentication.answerable(client).tenant
        return await self._elsewhere.prepare(tenant, assignment, body)
