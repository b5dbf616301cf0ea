"""What the server says of itself: models, health, version, metrics."""

from __future__ import annotations

import time

import orjson
from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import Response

import baton
from baton.router.api.errors import ApiError
from baton.router.api.http.authentication import client_of
from baton.router.api.service import CompletionService
from baton.router.types import ModelInfo


class Status:
    """The read-only endpoints."""

    def __init__(self, service: CompletionService) -> None:
        self._service = service
        self._created = int(time.time())

    async def models(self, request: Request) -> Response:
        """The served model; none before a worker has told of it."""
        model, client = self._service.ring.model, client_of(request)
        known = model is not None and (client is None or client.may_ask(model.name))
        entries = [self._entry(model)] if model is not None and known else []
        return _json({"object": "list", "data": entries})

    async def model(self, request: Request) -> Response:
        """One model by its name."""
        return _json(self._entry(self._service.model(request.path_params["model_id"], client_of(request))))

    async def health(self, request: Request) -> Response:
        """200 when a request sent now could be answered, else 503 with the reason."""
        ring = self._service.ring
        if ring.model is None:
            raise ApiError(503, "No worker has told which model it serves yet.", code="not_ready")
        if ring.stale:
            message = "Who the workers are was not confirmed for too long: discovery cannot reach its source."
            raise ApiError(503, message, code="discovery_stale")
        if not ring.ready:
            raise ApiError(503, "No worker can take a request.", code="not_ready")
        return _json({"status": "ok"})

    async def version(self, request: Request) -> Response:
        """The server's version."""
        return _json({"version": baton.__version__})

    async def metrics(self, request: Request) -> Response:
        """Metrics in the format that the scraper prefers."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self._service.metrics.registry), headers={"content-type": content_type})

    def _entry(self, model: ModelInfo) -> dict[str, object]:
        return {
            "id": model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "baton",
            "root": model.name,
            "parent": None,
            "max_model_len": model.max_model_len,
        }


def _json(document: dict[str, object]) -> Response:
    return Response(orjson.dumps(document), media_type="application/json")
