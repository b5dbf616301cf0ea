"""``/debug/requests``: the trace of a request's time."""

from __future__ import annotations

from itertools import islice

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response

from baton.router.api.catalogue import Catalogue
from baton.router.api.errors import ApiError, invalid, shown
from baton.router.api.http.server.authentication import client_of
from baton.router.processes.siblings import Siblings
from baton.router.traces.document import Document, document_of, summary_of

MAX_LISTED = 100
MAX_ID = 256
REQUEST, REQUESTS = "request", "requests"
"""The names of the questions that the processes of a router ask each other."""


class TraceQuery(msgspec.Struct, frozen=True):
    """A question about requests from one process to the others."""

    whose: str | None
    """The tenant whose requests are meant; None: every tenant's."""
    request_id: str = ""
    workers: bool = False
    """Whether the answer is to name workers."""
    limit: int = 0


class Debug:
    """Shows requests to their tenants, and all requests to operators. Without keys, every client is an
    operator."""

    def __init__(self, catalogue: Catalogue, siblings: Siblings) -> None:
        self._traces = catalogue.traces
        self._siblings = siblings
        siblings.on(REQUEST, self._tell_request)
        siblings.on(REQUESTS, self._tell_requests)

    async def request(self, request: Request) -> Response:
        """Return one request, by the id of its answer, its response header ``x-baton-request-id``, or the
        client's own id."""
        request_id = request.path_params["request_id"]
        asked = TraceQuery(_whose(request), request_id, is_operator(request))
        told = b""
        if len(request_id) <= MAX_ID:
            told = self._request(asked) or await self._elsewhere(asked)
        if not told:
            message = (
                f"Nothing is known of request {shown(request_id)}: it is too long ago, or none of yours."
            )
            raise ApiError(404, message, code="request_not_found")
        return _json(told)

    async def requests(self, request: Request) -> Response:
        """Return ``limit`` requests: those that run, then those that ended last."""
        given = request.query_params.get("limit", "20")
        if not (given.isascii() and given.isdigit() and len(given) <= 3 and 1 <= int(given) <= MAX_LISTED):
            raise invalid("limit", f"limit must be between 1 and {MAX_LISTED}, not {shown(given)}.")
        asked = TraceQuery(_whose(request), limit=int(given))
        listed = self._requests(asked)
        for told in (await self._siblings.ask(REQUESTS, msgspec.json.encode(asked))).values():
            listed += orjson.loads(told)
        if self._siblings.several:
            listed.sort(key=_latest_first, reverse=True)
        return _json(orjson.dumps({"requests": listed[: asked.limit]}))

    def _request(self, asked: TraceQuery) -> bytes:
        """Return the document of a request; empty if this process does not know the request."""
        trace = self._traces.find(asked.request_id, asked.whose)
        return b"" if trace is None else orjson.dumps(document_of(trace, workers=asked.workers))

    def _requests(self, asked: TraceQuery) -> list[Document]:
        return [summary_of(each) for each in islice(self._traces.latest(asked.whose), asked.limit)]

    async def _elsewhere(self, asked: TraceQuery) -> bytes:
        """Ask the other processes for a request. Raises ApiError (503) if a process that may know it does not
        answer."""
        told = await self._siblings.ask(REQUEST, msgspec.json.encode(asked))
        found = next(filter(None, told.values()), b"")
        if not found and len(told) < self._siblings.others:
            raise ApiError(503, "A process of this router does not answer; ask again.", code="not_ready")
        return found

    async def _tell_request(self, about: bytes) -> bytes:
        return self._request(msgspec.json.decode(about, type=TraceQuery))

    async def _tell_requests(self, about: bytes) -> bytes:
        return orjson.dumps(self._requests(msgspec.json.decode(about, type=TraceQuery)))


def _latest_first(told: Document) -> tuple[bool, str]:
    """Return the sort key by which running requests come before ended ones."""
    return told["outcome"] is None, str(told["arrived"])


def is_operator(request: Request) -> bool:
    """Whether the client may see all requests, and workers. Without keys every client may."""
    client = client_of(request)
    return client.key is None or client.operator


def _whose(request: Request) -> str | None:
    """Return the tenant whose requests the client may see; None: every tenant's."""
    return None if is_operator(request) else client_of(request).tenant.name


def _json(document: bytes) -> Response:
    return Response(document, media_type="application/json", headers={"cache-control": "no-store"})
