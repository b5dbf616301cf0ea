"""``/debug/requests``: where the time of a request went."""

from __future__ import annotations

from itertools import islice

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response

from baton.router.api.catalogue import Catalogue
from baton.router.api.errors import ApiError, invalid, shown
from baton.router.api.http.authentication import client_of
from baton.router.processes.siblings import Siblings
from baton.router.traces.document import Document, document_of, summary_of

MOST_LISTED = 100
LONGEST_ID = 256
REQUEST, REQUESTS = "request", "requests"
"""What the processes of a router ask each other for."""


class Asked(msgspec.Struct, frozen=True):
    """What one process asks the others of requests."""

    whose: str | None
    """The tenant; None: everybody's."""
    request_id: str = ""
    workers: bool = False
    """Whether to tell of these."""
    limit: int = 0


class Debug:
    """Tells of requests to whose they are, and to operators. Without keys, everybody is one."""

    def __init__(self, catalogue: Catalogue, siblings: Siblings) -> None:
        self._traces = catalogue.traces
        self._siblings = siblings
        siblings.on(REQUEST, self._tell_request)
        siblings.on(REQUESTS, self._tell_requests)

    async def request(self, request: Request) -> Response:
        """One request, by the id of its answer, its response header ``x-baton-request-id``, or the client's
        own."""
        request_id = request.path_params["request_id"]
        asked = Asked(_whose(request), request_id, is_operator(request))
        told = b""
        if len(request_id) <= LONGEST_ID:
            told = self._request(asked) or await self._elsewhere(asked)
        if not told:
            message = (
                f"Nothing is known of request {shown(request_id)}: it is too long ago, or none of yours."
            )
            raise ApiError(404, message, code="request_not_found")
        return _json(told)

    async def requests(self, request: Request) -> Response:
        """Those that run, then those that ended last; ``limit`` of them."""
        given = request.query_params.get("limit", "20")
        if not (given.isascii() and given.isdigit() and len(given) <= 3 and 1 <= int(given) <= MOST_LISTED):
            raise invalid("limit", f"limit must be between 1 and {MOST_LISTED}, not {shown(given)}.")
        asked = Asked(_whose(request), limit=int(given))
        listed = self._requests(asked)
        for told in (await self._siblings.ask(REQUESTS, msgspec.json.encode(asked))).values():
            listed += orjson.loads(told)
        if self._siblings.several:
            listed.sort(key=_latest_first, reverse=True)
        return _json(orjson.dumps({"requests": listed[: asked.limit]}))

    def _request(self, asked: Asked) -> bytes:
        """Nothing: it is not known here."""
        trace = self._traces.find(asked.request_id, asked.whose)
        return b"" if trace is None else orjson.dumps(document_of(trace, workers=asked.workers))

    def _requests(self, asked: Asked) -> list[Document]:
        return [summary_of(each) for each in islice(self._traces.latest(asked.whose), asked.limit)]

    async def _elsewhere(self, asked: Asked) -> bytes:
        """Raises ApiError (503) if it may be known to a process that says nothing."""
        told = await self._siblings.ask(REQUEST, msgspec.json.encode(asked))
        found = next(filter(None, told.values()), b"")
        if not found and len(told) < self._siblings.others:
            raise ApiError(503, "A process of this router does not answer; ask again.", code="not_ready")
        return found

    async def _tell_request(self, about: bytes) -> bytes:
        return self._request(msgspec.json.decode(about, type=Asked))

    async def _tell_requests(self, about: bytes) -> bytes:
        return orjson.dumps(self._requests(msgspec.json.decode(about, type=Asked)))


def _latest_first(told: Document) -> tuple[bool, str]:
    """Those that run before those that have ended."""
    return told["outcome"] is None, str(told["arrived"])


def is_operator(request: Request) -> bool:
    """Whether its client may hear of all requests and of workers. Without keys everybody may."""
    client = client_of(request)
    return client is None or client.key is None or client.operator


def _whose(request: Request) -> str | None:
    """The tenant of whose requests the client may hear; None: of everybody's."""
    client = client_of(request)
    return None if client is None or is_operator(request) else client.tenant.name


def _json(document: bytes) -> Response:
    return Response(document, media_type="application/json", headers={"cache-control": "no-store"})
