"""``/debug/requests``: the trace of a request's time."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response

from baton.router.api.catalogue import Catalogue
from baton.router.api.errors import ApiError, invalid, shown
from baton.router.api.http.server.authentication import client_of
from baton.router.processes.siblings import Siblings
from baton.router.traces.document import Document, document_of, summary_of
from baton.router.traces.selection import Position, Selection

MAX_LISTED = 100
MAX_ID = 256
MAX_VALUE = 256
"""The most characters of a value that requests are selected by."""
REQUEST, REQUESTS = "request", "requests"
"""The names of the questions that the processes of a router ask each other."""


class TraceQuery(msgspec.Struct, frozen=True):
    """A question about requests from one process to the others."""

    whose: str | None
    """The tenant whose requests are meant; None: every tenant's."""
    workers: bool
    """Whether the answer is to name workers."""
    request_id: str = ""
    selection: Selection = Selection(0)


class Listed(msgspec.Struct):
    """The requests that one process lists, the latest first, each with its position."""

    entries: list[tuple[Position, Document]]
    num_dropped: int
    """The number of requests that the process no longer keeps."""


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
        asked = TraceQuery(_whose(request), is_operator(request), request_id)
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
        """Return the latest requests that the query selects, those that run included, and where the next page
        begins."""
        selection = _selection(request.query_params)
        asked = TraceQuery(_whose(request), is_operator(request), selection=selection)
        told = await self._siblings.ask(REQUESTS, msgspec.json.encode(asked))
        lists = [self._requests(asked)]
        lists += (msgspec.json.decode(each, type=Listed) for each in told.values())
        entries = sorted((entry for each in lists for entry in each.entries), key=_position, reverse=True)
        page = entries[: selection.limit]
        full = len(page) == selection.limit
        document = {
            "requests": [summary for _, summary in page],
            "next": page[-1][0].cursor if full else None,
            "kept": {
                "max_requests": len(lists) * self._traces.max_requests,
                "max_bytes": len(lists) * self._traces.max_bytes,
                "num_dropped": sum(each.num_dropped for each in lists) if asked.whose is None else None,
            },
            "silent_processes": self._siblings.others - len(told),
        }
        return _json(orjson.dumps(document))

    def _request(self, asked: TraceQuery) -> bytes:
        """Return the document of a request; empty if this process does not know the request."""
        trace = self._traces.find(asked.request_id, asked.whose)
        return b"" if trace is None else orjson.dumps(document_of(trace, workers=asked.workers))

    def _requests(self, asked: TraceQuery) -> Listed:
        found = asked.selection.of(self._traces.searched(asked.whose))
        entries = [(Position.of(each), summary_of(each, workers=asked.workers)) for each in found]
        return Listed(entries, self._traces.num_dropped)

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
        return msgspec.json.encode(self._requests(msgspec.json.decode(about, type=TraceQuery)))


def _position(entry: tuple[Position, Document]) -> Position:
    return entry[0]


def _selection(query: Mapping[str, str]) -> Selection:
    """Return what a list's query selects. Raises RequestError."""
    for name in query:
        if name not in ("limit", "model", "tenant", "outcome", "min_ttft_ms", "before"):
            raise invalid(name, f"{shown(name)} is not a field by which requests are selected.")
        if len(query[name]) > MAX_VALUE:
            raise invalid(name, f"{name} must have at most {MAX_VALUE} characters.")
    given = query.get("limit", "20")
    if not (given.isascii() and given.isdigit() and len(given) <= 3 and 1 <= int(given) <= MAX_LISTED):
        raise invalid("limit", f"limit must be between 1 and {MAX_LISTED}, not {shown(given)}.")
    return Selection(
        int(given),
        model=query.get("model"),
        tenant=query.get("tenant"),
        outcome=query.get("outcome"),
        min_ttft_s=_min_ttft_s(query.get("min_ttft_ms")),
        before=_before(query.get("before")),
    )


def _min_ttft_s(given: str | None) -> float | None:
    if given is None:
        return None
    try:
        milliseconds = float(given)
    except ValueError:
        milliseconds = math.nan
    if not 0 <= milliseconds < math.inf:
        raise invalid("min_ttft_ms", f"min_ttft_ms must be a number of at least 0, not {shown(given)}.")
    return milliseconds / 1e3


def _before(given: str | None) -> Position | None:
    if given is None:
        return None
    position = Position.parse(given)
    if position is None:
        raise invalid("before", f"before must be the field next of a list, not {shown(given)}.")
    return position


def is_operator(request: Request) -> bool:
    """Whether the client may see all requests, and workers. Without keys every client may."""
    client = client_of(request)
    return client.key is None or client.operator


def _whose(request: Request) -> str | None:
    """Return the tenant whose requests the client may see; None: every tenant's."""
    return None if is_operator(request) else client_of(request).tenant.name


def _json(document: bytes) -> Response:
    return Response(document, media_type="application/json", headers={"cache-control": "no-store"})
