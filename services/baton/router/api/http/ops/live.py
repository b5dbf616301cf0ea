"""``/ui``: the router's live page, its files and its figures."""

from __future__ import annotations

from importlib.resources import files

import orjson
from starlette.requests import Request
from starlette.responses import Response

from baton.router.api.errors import ApiError
from baton.router.api.http.ops.debug import is_operator
from baton.router.ui.history import History

FILES = {
    "/ui": ("index.html", "text/html; charset=utf-8"),
    "/ui/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/ui/page.css": ("page.css", "text/css; charset=utf-8"),
}
"""The page's files, by path. They reveal nothing: where there are keys, the figures need one."""

_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class LivePage:
    """The files of the live page, and the figures that it shows."""

    def __init__(self, history: History) -> None:
        self._history = history
        page = files("baton.router.ui") / "page"
        self._files = {path: (page / name).read_bytes() for path, (name, _) in FILES.items()}

    async def file(self, request: Request) -> Response:
        """Return a file of the page."""
        path = request.scope["route"].path
        return Response(self._files[path], headers={"content-type": FILES[path][1], **_HEADERS})

    async def data(self, request: Request) -> Response:
        """Return the figures that the page shows. Raises ApiError (403) if the client is not an operator."""
        if not is_operator(request):
            raise ApiError(403, "This key is not an operator's.", code="permission_denied")
        return Response(
            orjson.dumps(await self._history.document()),
            media_type="application/json",
            headers={"cache-control": "no-store"},
        )
