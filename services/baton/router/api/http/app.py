"""The HTTP application."""

from __future__ import annotations

from fastapi import FastAPI
from prometheus_client import CollectorRegistry

import baton
from baton.router.api.catalogue import Catalogue
from baton.router.api.http.anthropic import create as messages
from baton.router.api.http.anthropic.fields import CountRequest, MessageRequest
from baton.router.api.http.openai import chat, completions, schemas, tokens
from baton.router.api.http.openapi import DescribedApi, takes
from baton.router.api.http.ops.debug import Debug
from baton.router.api.http.ops.live import LivePage
from baton.router.api.http.ops.status import StatusEndpoints
from baton.router.api.http.preparing.prepare import reading_of
from baton.router.api.http.responses import create as responses
from baton.router.api.http.responses.fields import ResponseRequest
from baton.router.api.http.server.anthropic_errors import ENDPOINT as MESSAGES
from baton.router.api.http.server.authentication import Authenticate
from baton.router.api.http.server.bodies import BodyBudget
from baton.router.api.http.server.cors import Cors, add_cors
from baton.router.api.http.server.envelope import RequestEnvelope
from baton.router.api.http.server.failures import add_error_handlers
from baton.router.api.http.server.local_pages import LocalPages
from baton.router.api.http.server.served import ServedApi
from baton.router.api.service import CompletionService
from baton.router.api.settings import ApiSettings
from baton.router.dispatch.types import Ring
from baton.router.processes.siblings import Siblings
from baton.router.ui.files import PAGE_FILES
from baton.router.ui.history import History
from baton.telemetry.metrics import RouterMetrics
from baton.text.tokenizer import Tokenizer


def create_app(
    ring: Ring,
    tokenizer: Tokenizer,
    settings: ApiSettings | None = None,
    metrics: RouterMetrics | None = None,
) -> FastAPI:
    """Return OpenAI's API in front of ``ring``. Give ``metrics`` to share them with the gRPC API."""
    metrics = metrics or RouterMetrics(CollectorRegistry())
    service = CompletionService(ring, tokenizer, settings or ApiSettings(), metrics)
    return app_for(service)


def app_for(
    *services: CompletionService,
    cors: Cors | None = None,
    history: History | None = None,
    siblings: Siblings | None = None,
    local: bool = False,
) -> FastAPI:
    """Return the application around completion cores, one for each model, which other front ends may share.

    ``history`` is what the live page shows; None: there is no page. ``siblings`` are the other processes that
    answer at the same address. ``local``: whether only this machine reaches the port; without keys, pages of
    the web are then kept away.
    """
    catalogue = Catalogue(services)
    app = DescribedApi(
        title="Baton", version=baton.__version__, summary="Inference with the APIs of OpenAI and Anthropic"
    )
    _add_routes(app, catalogue, siblings or Siblings())
    if history is not None:
        _add_page(app, LivePage(history))
    settings, authentication, http = catalogue.settings, catalogue.authentication, catalogue.metrics.http
    bodies = BodyBudget(settings.max_body_bytes, http, shared=authentication.required)
    app.state.api = ServedApi(catalogue, reading_of(catalogue), bodies)
    retry_after = settings.retry_after_seconds
    cors = cors or Cors()
    add_error_handlers(app, retry_after)
    app.add_middleware(
        Authenticate, authentication=authentication, audit=catalogue.audit, retry_after_seconds=retry_after
    )
    if local and not authentication.required:
        app.add_middleware(LocalPages, origins=cors.origins, metrics=http, retry_after_seconds=retry_after)
    app.add_middleware(
        RequestEnvelope,
        metrics=catalogue.metrics,
        retry_after_seconds=retry_after,
        audit=catalogue.audit,
        traces=catalogue.traces,
    )
    add_cors(app, cors)
    return app


def _add_page(app: FastAPI, page: LivePage) -> None:
    for path in PAGE_FILES:
        app.add_api_route(path, page.file, methods=["GET"], response_model=None, include_in_schema=False)
    app.add_api_route("/ui/data", page.data, methods=["GET"], response_model=None, include_in_schema=False)


def _add_routes(app: FastAPI, catalogue: Catalogue, siblings: Siblings) -> None:
    status, debug = StatusEndpoints(catalogue, siblings), Debug(catalogue, siblings)
    for path, handler, body in (
        (completions.ENDPOINT, completions.create, schemas.CompletionRequest),
        (chat.ENDPOINT, chat.create, schemas.ChatRequest),
        (responses.ENDPOINT, responses.create, ResponseRequest),
        (MESSAGES, messages.create, MessageRequest),
        (f"{MESSAGES}/count_tokens", messages.count, CountRequest),
        ("/tokenize", tokens.tokenize, schemas.TokenizeRequest),
        ("/detokenize", tokens.detokenize, schemas.DetokenizeRequest),
    ):
        app.add_api_route(path, handler, methods=["POST"], response_model=None, openapi_extra=takes(body))
    for path, handler in (
        ("/v1/models", status.models),
        ("/v1/models/{model_id:path}", status.model),
        ("/health", status.health),
        ("/ping", status.health),
        ("/load", status.load),
        ("/version", status.version),
        ("/metrics", status.metrics),
        ("/debug/requests", debug.requests),
        ("/debug/requests/{request_id:path}", debug.request),
    ):
        app.add_api_route(path, handler, methods=["GET"], response_model=None)
    app.add_api_route("/ping", status.health, methods=["POST"], response_model=None)
