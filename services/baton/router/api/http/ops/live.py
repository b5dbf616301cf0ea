"""``/ui``: the router's live page, its files and its figures."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from baton.router.api.errors import invalid, shown
from baton.router.api.http.ops.debug import is_operator
from baton.router.api.http.server.authentication import client_of
from baton.router.ui.files import PAGE_FILES
from baton.router.ui.history import History

_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class LivePage:
    """The files of the live page, and the figures that it shows."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._files = {path: file.content() for path, file in PAGE_FILES.items()}

    async def file(self, request: Request) -> Response:
        """Return a file of the page."""
        path = request.scope["route"].path
        return Response(self._files[path], headers={"content-type": PAGE_FILES[path].kind, **_HEADERS})

    async def data(self, request: Request) -> Response:
        """Return the figures that the page shows: to an operator all of them, with the points of higher
        numbers than the parameter ``after``; to others those of their tenant."""
        after = request.query_params.get("after", "0")
        if not (after.isascii() and after.isdigit() and len(after) <= 15):
            raise invalid("after", f"after must be the number of a point, not {shown(after)}.")
        if is_operator(request):
            document = await self._history.document(int(after))
        else:
            document = await self._history.document_of(client_of(request).tenant.name)
        headers = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
        return Response(document, media_type="application/json", headers=headers)
