"""The audit log: one line of JSON for each request, with who asked for what and what it used. Prompts are
written only if that is configured. What is refused before it is known who asks has one line for each second
and address."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn, Protocol

import orjson
from prometheus_client import CollectorRegistry

from baton.process.options import ConfigError
from baton.router.api.errors import ApiError
from baton.router.api.relay import SlowClientError
from baton.router.api.strangers import StrangersRequests, StrangersTally
from baton.router.dispatch.types import RingError
from baton.router.security.client import Client
from baton.telemetry.audit import AuditMetrics
from baton.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

MAX_PROMPT = 4096
"""The most tokens, and characters, that are written of each prompt."""
MAX_PROMPTS = 16
BEAT_S = 1.0
"""The time between two lines about refused strangers from one address, in seconds, and between two tries to
write a log that could not be written while no line is to be written."""


@dataclass(slots=True)
class AuditRecord:
    """The facts about one request so far."""

    request_id: str
    endpoint: str = "other"
    client_id: str | None = None
    """The client's own id of the request."""
    address: str | None = None
    """The address that the request came from, as bounds count it."""
    with_prompts: bool = False
    started: float = field(default_factory=time.perf_counter)
    client: Client | None = None
    model: str | None = None
    status: int = 0
    outcome: str | None = None
    """How the answer ended: completed, cancelled (the client left), or an error's code; None: nothing was to
    be generated."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    attempts: int = 0
    prompts: list[str] = field(default_factory=list)

    def asks(self, model: str, prompts: Sequence[list[int]], tokens: int, tokenizer: Tokenizer) -> None:
        """Note that ``model`` is to answer ``prompts`` of ``tokens`` tokens in all. Their text is decoded
        only if it is to be written."""
        self.model = model
        self.prompt_tokens = tokens
        if self.with_prompts:
            self.prompts = [
                tokenizer.decode(prompt[:MAX_PROMPT], False)[:MAX_PROMPT] for prompt in prompts[:MAX_PROMPTS]
            ]

    def attempted(self, attempt: int) -> None:
        """Note that tokens of ``attempt`` have come; the first attempt is 0."""
        self.attempts = max(self.attempts, attempt + 1)

    def line(self) -> bytes:
        entry: dict[str, object] = {
            "time": _now(),
            "request_id": self.request_id,
            "client_request_id": self.client_id,
            "tenant": None if self.client is None else self.client.tenant.name,
            "key": None if self.client is None else self.client.key,
            "model": self.model,
            "endpoint": self.endpoint,
            "status": self.status,
            "outcome": self.outcome,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens,
            "attempts": self.attempts,
            "ms": round(1e3 * (time.perf_counter() - self.started), 1),
        }
        if self.with_prompts:
            entry["prompts"] = self.prompts
        return orjson.dumps(entry)


def outcome_of(error: BaseException | None) -> str:
    """Return how an answer ended, given the ``error`` that ended it, if any."""
    if error is None:
        return "completed"
    if isinstance(error, ApiError | RingError):
        return error.code or "error"
    if isinstance(error, SlowClientError):
        return "slow_client"
    return "error" if isinstance(error, Exception) else "cancelled"


class _Sink(Protocol):
    """A destination of lines."""

    def write(self, data: bytes) -> None:
        """Write all of ``data``. Raises OSError."""

    def close(self) -> None: ...


class _Stderr:
    """Standard error, without its buffer: what cannot be written is not kept for later."""

    def __init__(self) -> None:
        self._descriptor = sys.stderr.fileno()

    def write(self, data: bytes) -> None:
        _write_all(self._descriptor, data)

    def close(self) -> None:
        pass


class _File:
    """A file that is opened again after it was renamed, as rotation does, or removed. Only its owner may read
    it."""

    def __init__(self, path: str) -> None:
        """Open the file. Raises OSError."""
        self._path = Path(path)
        self._descriptor = -1
        self._identity: tuple[int, int] | None = None
        self._torn = False
        """Whether the last write left the beginning of a line, which the next line must not continue."""
        self._open()

    def write(self, data: bytes) -> None:
        if self._identity is None or self._identity != self._found():
            self.close()
            self._open()
        try:
            _write_all(self._descriptor, b"\n" + data if self._torn else data)
        except _TornError as error:
            self._torn = True
            raise error.cause from None
        self._torn = False

    def _open(self) -> None:
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        opened = os.fstat(self._descriptor)
        self._identity = (opened.st_dev, opened.st_ino)

    def _found(self) -> tuple[int, int] | None:
        """Return the identity of the file that the path names now; None if there is none."""
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino

    def close(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor, self._identity = self._descriptor, -1, None
            self._torn = False
            os.close(descriptor)


class _TornError(OSError):
    """A write that failed with ``cause`` after some of its bytes were written."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(cause.errno, cause.strerror)
        self.cause = cause


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except OSError as error:
            if len(rest) < len(data):
                raise _TornError(error) from None
            raise


class AuditLog:
    """Writes a line when a request ends. Event loop's thread only.

    A line that cannot be written is lost: it is counted, and written nowhere else, as it may hold a prompt.
    The first line that can be written again is preceded by a line that says how many are missing. Whether a
    line about strangers could be written decides nothing about the requests of tenants.
    """

    def __init__(
        self,
        path: str,
        *,
        prompts: bool = False,
        required: bool = False,
        metrics: AuditMetrics | None = None,
    ) -> None:
        """``path``: "-" for standard error. ``required``: whether requests are refused while their lines
        could not be written. Raises ConfigError if the file cannot be written."""
        self._prompts = prompts
        self._required = required
        self._metrics = metrics or AuditMetrics(CollectorRegistry())
        self._failing = False
        self._strangers = StrangersTally()
        self._missing = 0
        """The number of lines lost since the last one that was written."""
        try:
            self._sink: _Sink = _Stderr() if path == "-" else _File(path)
        except OSError as error:
            raise ConfigError("audit_log", f"{path}: {error.strerror or error}") from None

    def begin(
        self,
        request_id: str,
        client_id: str | None = None,
        endpoint: str = "other",
        address: str | None = None,
    ) -> AuditRecord:
        return AuditRecord(request_id, endpoint, client_id, address, self._prompts)

    def check(self) -> None:
        """Raise ApiError if no request may be answered now."""
        if self._required and self._failing:
            message = "The audit log cannot be written, and no request is answered that it does not tell of."
            raise ApiError(503, message, code="audit_log_unavailable")

    def end(self, record: AuditRecord) -> None:
        """Write the line of a request that is over, or count it if nobody knows who asked."""
        if record.client is None:
            self._strangers.add(record.address, record.request_id, record.endpoint, record.status)
        else:
            self._write(record.line() + b"\n")

    async def run(self) -> NoReturn:
        """Write the lines about strangers, and try a log that cannot be written from time to time, also if no
        request comes. Runs for as long as the router."""
        while True:
            await asyncio.sleep(BEAT_S)
            self.tell_strangers()
            if self._failing:
                self._write(b"")

    def tell_strangers(self) -> None:
        """Write what strangers have asked since this was called last."""
        for address, requests in self._strangers.take().items():
            self._write(_strangers_line(address, requests) + b"\n", strangers=True)

    def close(self) -> None:
        self.tell_strangers()
        self._sink.close()

    def _write(self, line: bytes, *, strangers: bool = False) -> None:
        try:
            self._sink.write(self._gap() + line if self._failing or self._missing else line)
        except OSError as error:
            self._missing += bool(line)
            self._metrics.lost.inc(bool(line))
            if strangers:
                return
            if not self._failing:
                log.error("the audit log cannot be written, lines are lost: %s", error.strerror or error)
            self._failing = True
        else:
            if self._failing:
                log.warning("the audit log can be written again: %d lines were lost", self._missing)
            self._failing = False
            self._missing = 0
        self._metrics.up.set(not self._failing)

    def _gap(self) -> bytes:
        return orjson.dumps({"time": _now(), "lost_lines": self._missing}) + b"\n"


def _strangers_line(address: str | None, requests: StrangersRequests) -> bytes:
    entry: dict[str, object] = {
        "time": _now(),
        "request_id": requests.request_id,
        "tenant": None,
        "address": address,
        "requests": requests.count,
        "endpoint": requests.endpoint,
        "status": requests.status,
    }
    return orjson.dumps(entry)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
