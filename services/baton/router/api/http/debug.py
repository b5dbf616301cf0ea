"""``/debug/requests``: where the time of a request went."""

from __future__ import annotations

from itertools import islice

import orjson
from starlette.requests import Request
from starlette.responses import Response

from baton.router.api.catalogue import Catalogue
from baton.router.api.errors import ApiError, invalid, shown
from baton.router.api.http.authentication import client_of
from baton.router.traces.document import document_of, summary_of

MOST_LISTED = 100
LONGEST_ID = 256


class Debug:
    """Tells of requests to whose they are, and to operators. Without keys, everybody is one."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._traces = catalogue.traces

    async def request(self, request: Request) -> Response:
        """One request, by the id of its answer, its response header ``x-baton-request-id``, or the client's
        own."""
        request_id = request.path_params["request_id"]
        whose = _whose(request)
        trace = self._traces.find(request_id, whose) if len(request_id) <= LONGEST_ID else None
        if trace is None:
            message = (
                f"Nothing is known of request {shown(request_id)}: it is too long ago, or none of yours."
            )
            raise ApiError(404, message, code="request_not_found")
        return _json(document_of(trace, workers=is_operator(request)))

    async def requests(self, request: Request) -> Response:
        """Those that run, then those that ended last; ``limit`` of them."""
        given = request.query_params.get("limit", "20")
        if not (given.isascii() and given.isdigit() and len(given) <= 3 and 1 <= int(given) <= MOST_LISTED):
            raise invalid("limit", f"limit must be between 1 and {MOST_LISTED}, not {shown(given)}.")
        whose = _whose(request)
        return _json(
            {"requests": [summary_of(each) for each in islice(self._traces.latest(whose), int(given))]}
        )


def is_operator(request: Request) -> bool:
    """Whether its client may hear of all requests and of workers. Without keys everybody may."""
    client = client_of(request)
    return client is None or client.key is None or client.operator


def _whose(request: Request) -> str | None:
    """The tenant of whose requests the client may hear; None: of everybody's."""
    client = client_of(request)
    return None if client is None or is_operator(request) else client.tenant.name


def _json(document: dict[str, object]) -> Response:
    return Response(
        orjson.dumps(document), media_type="application/json", headers={"cache-control": "no-store"}
    )
