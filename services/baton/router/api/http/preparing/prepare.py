"""Bodies of all endpoints, for all models."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import msgspec

from baton.router.api.catalogue import Catalogue
from baton.router.api.errors import RequestError, in_short
from baton.router.api.http.anthropic.fields import CountRequest, MessageRequest
from baton.router.api.http.anthropic.fields import check_refused as check_message
from baton.router.api.http.openai.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TextRequest,
    TokenizeRequest,
)
from baton.router.api.http.preparing.chat import ChatPreparer
from baton.router.api.http.preparing.common import Chosen
from baton.router.api.http.preparing.completion import CompletionPreparer
from baton.router.api.http.preparing.kinds import GENERATING, KINDS
from baton.router.api.http.preparing.message import MessagePreparer
from baton.router.api.http.preparing.response import ResponsePreparer
from baton.router.api.http.preparing.tokens import TokensPreparer
from baton.router.api.http.responses.fields import ResponseRequest
from baton.router.api.http.responses.fields import check_refused as check_response
from baton.router.api.http.server.decode import decode
from baton.router.api.prepared import Assignment, Document, PreparedJob
from baton.router.api.prompts import PromptReader, TemplateRules
from baton.router.api.reading import INLINE_BYTES, Reading
from baton.router.api.settings import ApiSettings
from baton.text.tokenizer import Tokenizer
from baton.tools.answer import AnswerFormat

MAX_MESSAGE = 2000
"""The most characters of an error's message."""


@dataclass(frozen=True, slots=True)
class ModelPreparers:
    """The readers of bodies for one model."""

    tokenizer: Tokenizer
    completions: CompletionPreparer
    chats: ChatPreparer
    messages: MessagePreparer
    responses: ResponsePreparer
    tokens: TokensPreparer

    @classmethod
    def of(cls, tokenizer: Tokenizer, settings: ApiSettings) -> ModelPreparers:
        return cls(
            tokenizer,
            CompletionPreparer(tokenizer, settings),
            ChatPreparer(tokenizer, settings),
            MessagePreparer(tokenizer, settings),
            ResponsePreparer(tokenizer, settings),
            TokensPreparer(tokenizer, settings),
        )


class BodyReader:
    """Reads bodies, each for one of several models."""

    def __init__(
        self,
        models: Callable[[int], ModelPreparers],
        *,
        max_chars: int | None = None,
        renders: bool = True,
        bounded: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """``models`` returns a model's preparers, by its place in the menu. ``max_chars``: see
        `PromptReader`. ``renders``: whether chat templates may be rendered here; ``bounded``: see
        `TemplateRules`."""
        self._models = models
        self._max_chars = max_chars
        self._renders = renders
        self._bounded = bounded

    def prepare(self, assignment: Assignment, body: bytes) -> PreparedJob | Document:
        """Return what ``body`` asks for. Raises RequestError, ApiError, and NotHereError."""
        try:
            return self._read(assignment, body)
        except RequestError as error:
            # Messages from other libraries may quote a whole value.
            raise RequestError(
                in_short(error.message, MAX_MESSAGE), param=error.param, code=error.code
            ) from None

    def format_of(self, prepared: PreparedJob) -> AnswerFormat | None:
        """Return how the answers to a chat are parsed; None: as content alone."""
        return self._models(prepared.model).chats.calls.format_of(prepared.format)

    def _read(self, assignment: Assignment, body: bytes) -> PreparedJob | Document:
        decoded = decode(body, KINDS[assignment.endpoint], GENERATING)
        prepared = self._prepared(assignment, decoded.fields)
        prepared.ignored = [*decoded.ignored, *prepared.ignored]
        return prepared

    def _prepared(self, assignment: Assignment, fields: msgspec.Struct) -> PreparedJob | Document:
        match fields:
            case CompletionRequest():
                own, chosen = self._choose(assignment, fields.model)
                return own.completions.prepare(fields, chosen)
            case ChatRequest():
                own, chosen = self._choose(assignment, fields.model)
                return own.chats.prepare(fields, chosen)
            case ResponseRequest():
                check_response(fields)
                own, chosen = self._choose(assignment, fields.model)
                return own.responses.prepare(fields, chosen)
            case MessageRequest():
                check_message(fields)
                own, chosen = self._choose(assignment, fields.model)
                return own.messages.prepare(fields, chosen)
            case CountRequest():
                check_message(fields)
                own, chosen = self._choose(assignment, fields.model)
                return own.messages.count(fields, chosen)
            case TokenizeRequest():
                own, chosen = self._choose(assignment, fields.model)
                return own.tokens.tokenize(fields, chosen)
            case DetokenizeRequest():
                own, chosen = self._choose(assignment, fields.model)
                return own.tokens.detokenize(fields, chosen)
            case TextRequest():
                own, chosen = self._choose(assignment, fields.model)
                return own.tokens.text(fields, chosen)
        raise TypeError(f"no endpoint has bodies of {type(fields).__name__}")

    def _choose(self, assignment: Assignment, name: str | None) -> tuple[ModelPreparers, Chosen]:
        place, model = assignment.menu.choose(name)
        own = self._models(place)
        rules = TemplateRules(assignment.refused_templates.get(place), self._bounded)
        prompts = PromptReader(own.tokenizer, self._max_chars, rules if self._renders else None)
        return own, Chosen(place, model, prompts)


def reading_of(catalogue: Catalogue) -> Reading:
    """Return the reader of bodies for all models of ``catalogue``."""
    models = [ModelPreparers.of(each.tokenizer, each.settings) for each in catalogue.services]
    alone = catalogue.elsewhere is None
    here = BodyReader(
        models.__getitem__,
        max_chars=None if alone else INLINE_BYTES,
        renders=alone,
    )
    return Reading(catalogue, here)
