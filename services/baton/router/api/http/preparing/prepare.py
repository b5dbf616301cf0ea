"""Bodies of all endpoints, for all models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from baton.router.api.errors import RequestError, in_short
from baton.router.api.http.decode import decode
from baton.router.api.http.messages.fields import CountRequest, MessageRequest
from baton.router.api.http.messages.fields import check_refused as check_message
from baton.router.api.http.preparing.chat import ChatPreparer
from baton.router.api.http.preparing.common import Chosen
from baton.router.api.http.preparing.completion import CompletionPreparer
from baton.router.api.http.preparing.message import MessagePreparer
from baton.router.api.http.preparing.response import ResponsePreparer
from baton.router.api.http.preparing.tokens import TokensPreparer
from baton.router.api.http.responses.fields import ResponseRequest
from baton.router.api.http.responses.fields import check_refused as check_response
from baton.router.api.http.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TextRequest,
    TokenizeRequest,
)
from baton.router.api.prepared import Assignment, Document, PreparedJob
from baton.router.api.prompts import PromptReader
from baton.router.api.settings import ApiSettings
from baton.text.tokenizer import Tokenizer

Body = TypeVar("Body", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class ModelPreparers:
    """What reads the bodies for one model."""

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
        ignore_unknown: bool,
        most_chars: int | None = None,
    ) -> None:
        """``models`` gives what a model has, by its place in the menu. ``ignore_unknown``: take fields that
        no version of the API knows. ``most_chars``: see `PromptReader`."""
        self._models = models
        self._ignore_unknown = ignore_unknown
        self._most_chars = most_chars

    def prepare(self, assignment: Assignment, body: bytes) -> PreparedJob | Document:
        """What ``body`` asks for. Raises RequestError, ApiError, and TooMuchHereError."""
        try:
            return self._read(assignment, body)
        except RequestError as error:
            # What others say of a value may quote it whole.
            raise RequestError(
                in_short(error.message, LONGEST_MESSAGE), param=error.param, code=error.code
            ) from None

    def _read(self, assignment: Assignment, body: bytes) -> PreparedJob | Document:
        match assignment.endpoint:
            case "completion":
                completion = self._decode(body, CompletionRequest)
                own, chosen = self._choose(assignment, completion.model)
                return own.completions.prepare(completion, chosen)
            case "chat":
                chat = self._decode(body, ChatRequest)
                own, chosen = self._choose(assignment, chat.model)
                return own.chats.prepare(chat, chosen)
            case "response":
                response = self._decode(body, ResponseRequest)
                check_response(response)
                own, chosen = self._choose(assignment, response.model)
                return own.responses.prepare(response, chosen)
            case "message":
                message = self._decode(body, MessageRequest)
                check_message(message)
                own, chosen = self._choose(assignment, message.model)
                return own.messages.prepare(message, chosen)
            case "count":
                counted = self._decode(body, CountRequest)
                check_message(counted)
                own, chosen = self._choose(assignment, counted.model)
                return own.messages.count(counted, chosen)
            case "tokenize":
                tokenize = self._decode(body, TokenizeRequest)
                own, chosen = self._choose(assignment, tokenize.model)
                return own.tokens.tokenize(tokenize, chosen)
            case "detokenize":
                detokenize = self._decode(body, DetokenizeRequest)
                own, chosen = self._choose(assignment, detokenize.model)
                return own.tokens.detokenize(detokenize, chosen)
            case "text":
                text = self._decode(body, TextRequest)
                own, chosen = self._choose(assignment, text.model)
                return own.tokens.text(text, chosen)

    def _decode(self, body: bytes, type_: type[Body]) -> Body:
        return decode(body, type_, ignore_unknown=self._ignore_unknown)

    def _choose(self, assignment: Assignment, name: str | None) -> tuple[ModelPreparers, Chosen]:
        place, model = assignment.menu.choose(name)
        own = self._models(place)
        return own, Chosen(place, model, PromptReader(own.tokenizer, self._most_chars))


LONGEST_MESSAGE = 2000
"""Characters of an error's message."""
