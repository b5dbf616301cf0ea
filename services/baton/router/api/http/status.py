"""What the server says of itself: models, health, version, metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

import orjson
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

import baton
from baton.router.api.catalogue import Catalogue
from baton.router.api.errors import ApiError
from baton.router.api.http.authentication import client_of
from baton.router.api.service import CompletionService
from baton.router.processes.figures import Together, families, pack, unpack
from baton.router.processes.siblings import Siblings
from baton.router.types import ModelInfo
from baton.telemetry.snapshot import Snapshot

METRICS = "metrics"
"""What the processes of a router ask each other for."""

Encoder = Callable[[Collector], bytes]


class Status:
    """The read-only endpoints."""

    def __init__(self, catalogue: Catalogue, siblings: Siblings) -> None:
        self._catalogue = catalogue
        self._siblings = siblings
        siblings.on(METRICS, self._packed_metrics)
        self._created = int(time.time())

    async def models(self, request: Request) -> Response:
        """The served models that the client may ask, under all their names; each once a worker has told of
        it."""
        client = client_of(request)
        entries = [
            self._entry(model, name)
            for service in self._catalogue.services
            if (model := service.ring.model) is not None and service.serves(client)
            for name in service.names or (model.name,)
        ]
        return _json({"object": "list", "data": entries})

    async def model(self, request: Request) -> Response:
        """One model by its name."""
        name = request.path_params["model_id"]
        return _json(self._entry(self._catalogue.service(name).model(name, client_of(request)), name))

    async def health(self, request: Request) -> Response:
        """200 when a request sent now could be answered, else 503 with the reason. Of several models, one is
        enough; ``?model=`` asks about one of them."""
        if self._catalogue.audit is not None:
            self._catalogue.audit.check()
        services = self._catalogue.services
        if asked := request.query_params.get("model"):
            services = (self._catalogue.service(asked),)
        problems = {service: _unready(service) for service in services}
        if all(problems.values()):
            raise next(error for error in problems.values() if error is not None)
        if len(services) == 1:
            return _json({"status": "ok"})
        states = {
            service.names[0]: "ok" if error is None else error.message for service, error in problems.items()
        }
        return _json({"status": "ok", "models": states})

    async def version(self, request: Request) -> Response:
        """The server's version."""
        return _json({"version": baton.__version__})

    async def metrics(self, request: Request) -> Response:
        """Metrics in the format that the scraper prefers. Read here, where nothing changes meanwhile; written
        out on a thread, as tokens are not to wait for a long page. Of several processes, those of all."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        others = await self._siblings.ask(METRICS)
        mine = self._snapshot()
        page = await asyncio.to_thread(self._page, encode, mine, others)
        return Response(page, headers={"content-type": content_type})

    def _page(self, encode: Encoder, mine: Snapshot, others: Mapping[int, bytes]) -> bytes:
        if not self._siblings.several:
            return encode(mine)
        figures = {index: unpack(packed) for index, packed in others.items()}
        return encode(Together({self._siblings.index: families(mine.collect()), **figures}))

    def _snapshot(self) -> Snapshot:
        return Snapshot(self._catalogue.metrics.exported)

    async def _packed_metrics(self, _: bytes) -> bytes:
        return await asyncio.to_thread(lambda mine: pack(families(mine.collect())), self._snapshot())

    def _entry(self, model: ModelInfo, name: str) -> dict[str, object]:
        """``name`` may be an alias of the model's."""
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "baton",
            "root": model.name,
            "parent": None,
            "max_model_len": model.max_model_len,
        }


def _unready(service: CompletionService) -> ApiError | None:
    """Why requests for a model could not be answered now; None: they could."""
    ring = service.ring
    if ring.model is None:
        return ApiError(503, "No worker has told which model it serves yet.", code="not_ready")
    if ring.stale:
        message = "Who the workers are was not confirmed for too long: discovery cannot reach its source."
        return ApiError(503, message, code="discovery_stale")
    if not ring.ready:
        return ApiError(503, "No worker can take a request.", code="not_ready")
    return None


def _json(document: dict[str, object]) -> Response:
    return Response(orjson.dumps(document), media_type="application/json")
