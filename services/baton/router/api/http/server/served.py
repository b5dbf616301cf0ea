"""The objects that the handlers of one application share."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from baton.router.api.catalogue import Catalogue
from baton.router.api.http.server.bodies import BodyBudget
from baton.router.api.reading import Reading


@dataclass(frozen=True, slots=True)
class ServedApi:
    """The objects that an application answers requests with, its ``state.api``."""

    catalogue: Catalogue
    reading: Reading
    bodies: BodyBudget


def api_of(request: Request) -> ServedApi:
    """Return the objects that ``request`` is answered with."""
    api: ServedApi = request.app.state.api
    return api
