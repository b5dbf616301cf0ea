"""The server under measurement: which model it serves, and how it takes and counts tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import orjson

from baton.bench.http import BrokenError, ConnectError, HttpClient
from baton.process.options import UserError

PromptForm = Literal["ids", "text"]

COMPLETIONS = "/v1/completions"
_REFUSED = (400, 422)
_ANSWER_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model as ``/v1/models`` describes it."""

    name: str
    context: int | None
    """Most tokens of prompt and answer together; None if the server does not report the limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFormat:
    """The format of requests to a server."""

    model: str
    prompts: PromptForm
    token_ids: bool
    """Whether to ask for the ids of each chunk's tokens."""
    ignore_eos: bool
    temperature: float

    def body(self, prompt: list[int] | str, max_tokens: int, seed: int) -> bytes:
        """Return a streamed completion of exactly ``max_tokens`` tokens, if ``ignore_eos`` is on."""
        fields: dict[str, object] = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": self.temperature,
            "seed": seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.token_ids:
            fields["return_token_ids"] = True
        if self.ignore_eos:
            fields["ignore_eos"] = True
        return orjson.dumps(fields)


async def find_model(client: HttpClient, wanted: str | None) -> ServedModel:
    """Find the model called ``wanted``, or the first one served. Raises UserError."""
    status, body = await _ask(client, "GET", "/v1/models")
    if status != 200:
        raise UserError(f"--url: /v1/models was answered with {refusal(status, body)}")
    try:
        entries = {str(entry["id"]): entry for entry in orjson.loads(body)["data"]}
    except (orjson.JSONDecodeError, LookupError, TypeError):
        raise UserError("--url: what /v1/models says is not a list of models") from None
    if not entries:
        raise UserError("--url: the server serves no model yet")
    name = wanted if wanted is not None else next(iter(entries))
    if name not in entries:
        raise UserError(f"--model: the server does not serve {name!r}; allowed: {', '.join(entries)}")
    context = entries[name].get("max_model_len")
    return ServedModel(name, context if isinstance(context, int) else None)


async def find_form(
    client: HttpClient,
    model: str,
    ids: list[int],
    text: str,
    *,
    prompts: PromptForm | None,
    ignore_eos: bool,
    temperature: float,
) -> RequestFormat:
    """Find the first format of requests that the server takes, with a short prompt given as ``ids`` and as
    ``text``: token ids before text (unless ``prompts`` says which), with the chunks' token ids before
    without.

    Raises UserError with the server's words when it takes none.
    """
    said = ""
    for form, token_ids in _forms(prompts):
        request = RequestFormat(
            model=model, prompts=form, token_ids=token_ids, ignore_eos=ignore_eos, temperature=temperature
        )
        body = request.body(ids if form == "ids" else text, 2, 0)
        status, answer = await _ask(client, "POST", COMPLETIONS, body)
        if status == 200:
            return request
        said = refusal(status, answer)
        if status not in _REFUSED:
            break
    hint = "; --no-ignore-eos leaves out a field that not all servers know" if ignore_eos else ""
    raise UserError(f"--url: {COMPLETIONS} answered a first request with {said}{hint}")


async def _ask(client: HttpClient, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    """Return status and body of an answer, before any measuring."""
    try:
        async with asyncio.timeout(_ANSWER_SECONDS), client.request(method, path, body) as response:
            return response.status, await response.body()
    except TimeoutError:
        raise UserError(f"--url: {path} was not answered within {_ANSWER_SECONDS:.0f} s") from None
    except (ConnectError, BrokenError) as error:
        raise UserError(f"--url: {error}") from None


def _forms(prompts: PromptForm | None) -> Iterator[tuple[PromptForm, bool]]:
    forms: tuple[PromptForm, ...] = ("ids", "text") if prompts is None else (prompts,)
    for form in forms:
        yield form, True
        yield form, False


def refusal(status: int, body: bytes) -> str:
    """Return a server's error in one line."""
    try:
        return f"{status}: {orjson.loads(body)['error']['message']}"
    except (orjson.JSONDecodeError, LookupError, TypeError):
        return f"{status}: {body[:200].decode(errors='replace')}"
