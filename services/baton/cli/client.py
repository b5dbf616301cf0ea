"""Asks a running ring over HTTP, with the standard library alone."""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import SplitResult, urlsplit

import orjson

from baton.process.options import UserError

_CONNECT_SECONDS = 5.0
_ANSWER_SECONDS = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What to ask. None leaves a setting to the server."""

    prompt: str
    chat: bool = True
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """What one event adds to the answer."""

    text: str
    completion_tokens: int | None = None  # of the whole answer; comes last


class ResponseBody(Protocol):
    """The part of an HTTP response that is read here: its body, line by line."""

    def readline(self, limit: int = -1, /) -> bytes:
        """The next line with its end, or nothing at the end."""


def is_ready(url: str) -> bool:
    """Whether the router at ``url`` could place a request now. Its certificate is not looked at: nothing is
    told to it, and it is a process of this machine."""
    try:
        connection = _connection(_split(url), 1.0, ssl._create_unverified_context())
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False


def ask(url: str, question: Question, api_key: str | None = None) -> Iterator[AnswerPiece]:
    """Stream the answer. Raises UserError when nothing answers, the ring refuses or the stream breaks."""
    base = _split(url)
    with _explaining(url):
        headers = {"Content-Type": "application/json"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        model = question.model or _first_model(base, headers)
        connection = _connection(base, _CONNECT_SECONDS)
        connection.connect()
        connection.sock.settimeout(_ANSWER_SECONDS)
        path = "/v1/chat/completions" if question.chat else "/v1/completions"
        connection.request("POST", base.path + path, orjson.dumps(_body(question, model)), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise RefusalError(response.status, response.read())
        yield from read_events(response)


class RefusalError(UserError):
    """A ring that refuses a request."""

    def __init__(self, status: int, body: bytes) -> None:
        self.status = status
        self.reason = _refusal(status, body)
        super().__init__(f"the ring refused: {self.reason}")


@contextmanager
def _explaining(url: str) -> Iterator[None]:
    """What goes wrong on the way to ``url`` is a line for a person."""
    try:
        yield
    except ConnectionRefusedError:
        raise UserError(f"nothing listens on {url}; start a ring with `baton up`") from None
    except TimeoutError:
        raise UserError(f"{url} did not answer in time") from None
    except (OSError, http.client.HTTPException) as error:
        raise UserError(f"the connection to {url} broke: {error or type(error).__name__}") from None


def get(url: str, path: str, api_key: str | None = None) -> bytes:
    """The document at ``path``. Raises UserError when nothing answers, and RefusalError when the ring
    refuses."""
    base = _split(url)
    with _explaining(url):
        connection = _connection(base, _CONNECT_SECONDS)
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        connection.request("GET", base.path + path, headers=headers)
        response = connection.getresponse()
        body = response.read()
    if response.status != 200:
        raise RefusalError(response.status, body)
    return body


def read_events(answer: ResponseBody) -> Iterator[AnswerPiece]:
    """The pieces in a server-sent-events body. Raises UserError on an error event or a cut-off stream."""
    while line := answer.readline():
        if not line.startswith(b"data:"):
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        event = orjson.loads(data)
        if "error" in event:
            raise UserError(f"the ring could not go on: {_refusal(500, data)}")
        yield _piece(event)
    raise UserError("the answer was cut off: the router closed the stream")


def _piece(event: dict[str, Any]) -> AnswerPiece:
    text = "".join(map(_text, event.get("choices", ())))
    return AnswerPiece(text, (event.get("usage") or {}).get("completion_tokens"))


def _text(choice: dict[str, Any]) -> str:
    """The text of a completion or a chat, reasoning included: without it nothing would come for long."""
    delta = choice.get("delta") or {}
    return choice.get("text") or (delta.get("reasoning_content") or "") + (delta.get("content") or "")


def _body(question: Question, model: str) -> dict[str, Any]:
    body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    if question.chat:
        body["messages"] = [{"role": "user", "content": question.prompt}]
    else:
        body["prompt"] = question.prompt
    for name in ("max_tokens", "temperature", "seed"):
        value = getattr(question, name)
        if value is not None:
            body[name] = value
    return body


def _first_model(base: SplitResult, headers: Mapping[str, str]) -> str:
    connection = _connection(base, _CONNECT_SECONDS)
    connection.request("GET", base.path + "/v1/models", headers=dict(headers))
    response = connection.getresponse()
    body = response.read()
    if response.status != 200:
        raise RefusalError(response.status, body)
    try:
        return str(orjson.loads(body)["data"][0]["id"])
    except (orjson.JSONDecodeError, LookupError, TypeError):
        raise UserError("the ring serves no model yet; ask again when its workers are ready") from None


def _refusal(status: int, body: bytes) -> str:
    try:
        return str(orjson.loads(body)["error"]["message"])
    except (orjson.JSONDecodeError, LookupError, TypeError):
        return f"HTTP {status} {http.client.responses.get(status, '')}".rstrip()


def _split(url: str) -> SplitResult:
    base = urlsplit(url.rstrip("/"))
    if base.scheme not in ("http", "https") or not base.hostname:
        raise UserError(f"{url!r} is not an address of a ring; write it like http://127.0.0.1:8000")
    return base


def _connection(
    base: SplitResult, timeout: float, tls: ssl.SSLContext | None = None
) -> http.client.HTTPConnection:
    assert base.hostname
    if base.scheme == "https":
        return http.client.HTTPSConnection(base.hostname, base.port, timeout=timeout, context=tls)
    return http.client.HTTPConnection(base.hostname, base.port, timeout=timeout)
