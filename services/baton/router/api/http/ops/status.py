"""The server's status: models, health, version, metrics."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import orjson
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

import baton
from baton.router.api.authentication import not_allowed
from baton.router.api.catalogue import Catalogue
from baton.router.api.errors import ApiError
from baton.router.api.http.server.authentication import client_of
from baton.router.api.service import CompletionService
from baton.router.dispatch.types import ModelInfo
from baton.router.processes.figures import Together, families, pack, unpack
from baton.router.processes.siblings import Siblings
from baton.telemetry.snapshot import Snapshot

METRICS = "metrics"
"""The name of the question for metrics that the processes of a router ask each other."""
LOAD = "load"
"""The name of the question for how many requests a process answers."""

Encoder = Callable[[Collector], bytes]


class StatusEndpoints:
    """The read-only endpoints."""

    def __init__(self, catalogue: Catalogue, siblings: Siblings) -> None:
        self._catalogue = catalogue
        self._siblings = siblings
        siblings.on(METRICS, self._packed_metrics)
        siblings.on(LOAD, self._packed_load)
        self._created = int(time.time())

    async def models(self, request: Request) -> Response:
        """Return the served models that the client may ask, under all their names, once a worker has said
        what it serves."""
        client = client_of(request)
        entries = [
            self._entry(model, name)
            for service in self._catalogue.services
            if (model := service.ring.model) is not None and service.serves(client)
            for name in service.names or (model.name,)
        ]
        return _json({"object": "list", "data": entries})

    async def model(self, request: Request) -> Response:
        """Return one model by its name."""
        name = request.path_params["model_id"]
        return _json(self._entry(self._catalogue.service(name).model(name, client_of(request)), name))

    async def health(self, request: Request) -> Response:
        """Return 200 if a request sent now could be answered, else 503. With several models, one that is
        ready is enough; ``?model=`` asks about one model.

        A client with a key, or any client where there are no keys, is told the models that it may ask, and
        why they cannot answer, and how many pairs of workers can never be linked, by the field in which they
        differ; a client without a key where one is needed is told nothing more.
        """
        asked = request.query_params.get("model")
        try:
            headers = request.headers
            client = self._catalogue.authentication.client(
                headers.get("authorization"), headers.get("x-api-key")
            )
        except ApiError:
            return self._health_for_strangers(asked)
        services = self._catalogue.services
        if asked:
            services = (self._catalogue.service(asked),)
        if client.models is not None:
            services = tuple(service for service in services if service.serves(client))
            if asked and not services:
                raise not_allowed(asked)
        problems = {service: _unready(service) for service in services}
        if all(problems.values()):
            raise next((error for error in problems.values() if error is not None), _not_ready())
        if len(services) == 1:
            return _json({"status": "ok"} | _unlinked(services))
        states = {
            service.names[0]: "ok" if error is None else error.message for service, error in problems.items()
        }
        return _json({"status": "ok", "models": states} | _unlinked(services))

    def _health_for_strangers(self, asked: str | None) -> Response:
        """Return the health without revealing which models exist: one that does not exist is not ready."""
        services = self._catalogue.services
        if asked and len(services) > 1:
            services = tuple(service for service in services if asked in service.names)
        if all(_unready(service) is not None for service in services):
            raise _not_ready()
        return _json({"status": "ok"})

    async def version(self, request: Request) -> Response:
        """Return the server's version."""
        return _json({"version": baton.__version__})

    async def load(self, request: Request) -> Response:
        """Return the number of requests that are generating now, in all processes, as vLLM names it."""
        others = await self._siblings.ask(LOAD)
        return _json({"server_load": self._in_flight() + sum(int(told) for told in others.values())})

    def _in_flight(self) -> int:
        return sum(
            int(sample.value)
            for metric in self._catalogue.metrics.in_flight.collect()
            for sample in metric.samples
        )

    async def _packed_load(self, _: bytes) -> bytes:
        return b"%d" % self._in_flight()

    async def metrics(self, request: Request) -> Response:
        """Return the metrics of all processes in the format that the scraper prefers. The metrics are read
        here, where nothing changes meanwhile, and rendered on a thread, as tokens must not wait for a long
        page."""
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
        """Return the entry of a model under ``name``, which may be an alias."""
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
    """Return why requests for a model could not be answered now; None if they could."""
    ring = service.ring
    if service.audit is not None:
        try:
            service.audit.check()
        except ApiError as error:
            return error
    if ring.model is None:
        return ApiError(503, "No worker has told which model it serves yet.", code="not_ready")
    if ring.stale:
        message = "Who the workers are was not confirmed for too long: discovery cannot reach its source."
        return ApiError(503, message, code="discovery_stale")
    if not ring.ready:
        return ApiError(503, "No worker can take a request.", code="not_ready")
    return None


def _unlinked(services: Sequence[CompletionService]) -> dict[str, object]:
    """Return what a healthy router says of pairs of workers that can never be linked; nothing if there are
    none."""
    pairs = sum((Counter(service.ring.unlinked_pairs()) for service in services), Counter[str]())
    return {"unlinked_pairs": dict(pairs)} if pairs else {}


def _not_ready() -> ApiError:
    return ApiError(503, "No request can be answered now.", code="not_ready")


def _json(document: dict[str, object]) -> Response:
    return Response(orjson.dumps(document), media_type="application/json")
