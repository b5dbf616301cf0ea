"""Checks of bodies that several endpoints share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.request.limits import ModelInfo
from baton.router.api.errors import invalid, shown
from baton.router.api.http.openai.schemas import GenerationFields
from baton.router.api.prepared import CLIENT_ID, Telling, UsageMode
from baton.router.api.prompts import Echo, PromptReader
from baton.router.api.settings import ApiSettings


@dataclass(frozen=True, slots=True)
class Chosen:
    """The model that a body is for."""

    place: int
    """The model's place in the menu."""
    model: ModelInfo
    prompts: PromptReader
    """The reader of this request's prompts."""


def check_choices(n: int, prompts: int, settings: ApiSettings) -> None:
    """Raise RequestError if a request asks for too many answers."""
    if not 1 <= n <= settings.max_n:
        raise invalid("n", f"n must be between 1 and {settings.max_n}, not {shown(n)}.")
    if n * prompts > settings.max_choices:
        raise invalid(
            "prompt" if n == 1 else "n",
            f"{prompts} prompts with n = {n} make {n * prompts} choices; at most "
            f"{settings.max_choices} are allowed in one request.",
        )


def check_told(
    fields: GenerationFields, prompts: Sequence[Sequence[int]], echoes: Sequence[Echo], settings: ApiSettings
) -> None:
    """Raise RequestError if the choices of a request would repeat more of its prompts than an answer may
    hold: each choice repeats its whole prompt."""
    n = 1 if fields.n is None else fields.n
    tokens = n * sum(map(len, prompts)) if fields.return_token_ids else 0
    if tokens > settings.max_told_tokens:
        raise invalid(
            "return_token_ids",
            f"return_token_ids with n = {n} tells {tokens} tokens of prompts; at most "
            f"{settings.max_told_tokens} are told.",
        )
    chars = n * sum(len(echo.text) for echo in echoes)
    if chars > settings.max_told_chars:
        raise invalid(
            "echo",
            f"echo with n = {n} repeats {chars} characters of prompts; at most {settings.max_told_chars} are "
            "repeated.",
        )


def telling_of(fields: GenerationFields) -> Telling:
    """Return how the answer is presented. An answer without a text tells its tokens. Raises RequestError."""
    if fields.stream_options is not None and not fields.stream:
        raise invalid("stream_options", "stream_options is only allowed when stream is true.")
    silent = fields.detokenize is False
    if silent and fields.echo:
        raise invalid("echo", "echo is a text, and detokenize is false.")
    return Telling(bool(fields.stream), _usage_mode(fields), silent or bool(fields.return_token_ids))


def client_id_of(fields: GenerationFields) -> str | None:
    """Return the client's own id of a request. Raises RequestError for one that cannot be told."""
    given = fields.request_id
    if given is not None and not CLIENT_ID.fullmatch(given):
        raise invalid(
            "request_id",
            f"request_id must be 1 to 128 of A-Z a-z 0-9 . _ : / + = -, not {shown(given)}.",
        )
    return given


def _usage_mode(fields: GenerationFields) -> UsageMode:
    options = fields.stream_options
    if options is None or not options.include_usage:
        return "none"
    return "continuous" if options.continuous_usage_stats else "final"
