"""The HTTP application."""

from __future__ import annotations

from fastapi import FastAPI
from prometheus_client import CollectorRegistry

import baton
from baton.router.api.http import schemas
from baton.router.api.http.authentication import Authenticate
from baton.router.api.http.chat import ChatCompletions
from baton.router.api.http.completions import Completions
from baton.router.api.http.envelope import RequestEnvelope
from baton.router.api.http.failures import add_error_handlers
from baton.router.api.http.openapi import DescribedApi, takes
from baton.router.api.http.status import Status
from baton.router.api.http.tokens import Tokens
from baton.router.api.service import CompletionService
from baton.router.api.settings import ApiSettings
from baton.router.types import Ring
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


def app_for(service: CompletionService) -> FastAPI:
    """The application around a completion core that may have other front ends too."""
    app = DescribedApi(title="Baton", version=baton.__version__, summary="OpenAI-compatible inference")
    _add_routes(app, service)
    retry_after = service.settings.retry_after_seconds
    add_error_handlers(app, retry_after)
    app.add_middleware(Authenticate, authentication=service.authentication, retry_after_seconds=retry_after)
    app.add_middleware(
        RequestEnvelope,
        metrics=service.metrics,
        retry_after_seconds=retry_after,
        audit=service.audit,
    )
    return app


def _add_routes(app: FastAPI, service: CompletionService) -> None:
    completions, chat = Completions(service), ChatCompletions(service)
    tokens, status = Tokens(service), Status(service)
    for path, handler, body in (
        ("/v1/completions", completions.create, schemas.CompletionRequest),
        ("/v1/chat/completions", chat.create, schemas.ChatRequest),
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
    ):
        app.add_api_route(path, handler, methods=["GET"], response_model=None)
