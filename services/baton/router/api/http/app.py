"""The HTTP application."""

from __future__ import annotations

from fastapi import FastAPI
from prometheus_client import CollectorRegistry

import baton
from baton.router.api.catalogue import Catalogue
from baton.router.api.http import schemas
from baton.router.api.http.authentication import Authenticate
from baton.router.api.http.bodies import BodyBudget
from baton.router.api.http.chat import ChatCompletions
from baton.router.api.http.completions import Completions
from baton.router.api.http.cors import Cors, add_cors
from baton.router.api.http.debug import Debug
from baton.router.api.http.envelope import RequestEnvelope
from baton.router.api.http.failures import add_error_handlers
from baton.router.api.http.live import FILES, LivePage
from baton.router.api.http.local import LocalPages
from baton.router.api.http.messages.create import Messages
from baton.router.api.http.messages.errors import ENDPOINT as MESSAGES
from baton.router.api.http.messages.fields import CountRequest, MessageRequest
from baton.router.api.http.openapi import DescribedApi, takes
from baton.router.api.http.responses.create import ENDPOINT as RESPONSES
from baton.router.api.http.responses.create import Responses
from baton.router.api.http.responses.fields import ResponseRequest
from baton.router.api.http.status import Status
from baton.router.api.http.tokens import Tokens
from baton.router.api.reading import Reading
from baton.router.api.service import CompletionService
from baton.router.api.settings import ApiSettings
from baton.router.processes.siblings import Siblings
from baton.router.types import Ring
from baton.router.ui.history import History
from baton.telemetry.metrics import RouterMetrics
from baton.text.tokenizer import Tokenizer


def create_app(
    ring: Ring,
    tokenizer: Tokenizer,
    settings: ApiSettings | None = None,
    metrics: RouterMetrics | None = None,
) -> FastAPI:
    """OpenAI's API in front of ``ring``. Give ``metrics`` to share them with the gRPC API."""
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
    """The application around completion cores, one for each model, that may have other front ends too.
    ``history``: what the live page shows; None: there is no page. ``siblings``: the other processes that
    answer at the same address. ``local``: only this machine reaches the port; without keys, pages of the web
    are kept away then."""
    catalogue = Catalogue(services)
    app = DescribedApi(
        title="Baton", version=baton.__version__, summary="Inference with the APIs of OpenAI and Anthropic"
    )
    _add_routes(app, catalogue, siblings or Siblings())
    if history is not None:
        _add_page(app, LivePage(history))
    settings, authentication, http = catalogue.settings, catalogue.authentication, catalogue.metrics.http
    app.state.bodies = BodyBudget(settings.max_body_bytes, http, shared=authentication.required)
    retry_after = settings.retry_after_seconds
    cors = cors or Cors()
    add_error_handlers(app, retry_after)
    app.add_middleware(Authenticate, authentication=authentication, retry_after_seconds=retry_after)
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
    for path in FILES:
        app.add_api_route(path, page.file, methods=["GET"], response_model=None, include_in_schema=False)
    app.add_api_route("/ui/data", page.data, methods=["GET"], response_model=None, include_in_schema=False)


def _add_routes(app: FastAPI, catalogue: Catalogue, siblings: Siblings) -> None:
    reading = Reading(catalogue)
    completions, chat = Completions(catalogue, reading), ChatCompletions(catalogue, reading)
    responses, messages = Responses(catalogue, reading), Messages(catalogue, reading)
    tokens = Tokens(catalogue, reading)
    status, debug = Status(catalogue, siblings), Debug(catalogue, siblings)
    for path, handler, body in (
        ("/v1/completions", completions.create, schemas.CompletionRequest),
        ("/v1/chat/completions", chat.create, schemas.ChatRequest),
        (RESPONSES, responses.create, ResponseRequest),
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
        ("/version", status.version),
        ("/metrics", status.metrics),
        ("/debug/requests", debug.requests),
        ("/debug/requests/{request_id:path}", debug.request),
    ):
        app.add_api_route(path, handler, methods=["GET"], response_model=None)
