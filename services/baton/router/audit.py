"""The audit log: one line of JSON for each request, of who asked what and what it took. Never its words,
unless that is asked for."""

from __future__ import annotations

import logging
import os
import sys
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from io import TextIOWrapper
from logging.handlers import WatchedFileHandler
from types import TracebackType

import orjson

from baton.options import ConfigError
from baton.router.api.errors import ApiError
from baton.router.api.relay import SlowClientError
from baton.router.security.client import Client
from baton.router.types import RingError

log = logging.getLogger(__name__)

LONGEST_PROMPT = 4096
"""Tokens, and characters, of each prompt that are written."""
MOST_PROMPTS = 16


@dataclass(slots=True)
class Record:
    """What is known of one request so far."""

    request_id: str
    endpoint: str = "other"
    client_id: str | None = None
    """The client's own id of it."""
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

    def attempted(self, attempt: int) -> None:
        """Tokens of this attempt have come; the first one is 0."""
        self.attempts = max(self.attempts, attempt + 1)

    def line(self) -> bytes:
        entry: dict[str, object] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
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


class Following:
    """Notes how an answer ends, as a context manager around it. ``record``: None where nothing is kept."""

    def __init__(self, record: Record | None) -> None:
        self._record = record

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._record is not None and self._record.outcome is None:
            self._record.outcome = outcome_of(error)


def outcome_of(error: BaseException | None) -> str:
    """How an answer ended that was left with ``error``."""
    if error is None:
        return "completed"
    if isinstance(error, ApiError | RingError):
        return error.code or "error"
    if isinstance(error, SlowClientError):
        return "slow_client"
    return "error" if isinstance(error, Exception) else "cancelled"


class _File(WatchedFileHandler):
    """Opened again when it was renamed, as rotation does. Nobody else may read it."""

    def _open(self) -> TextIOWrapper:
        descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        return os.fdopen(descriptor, "a", encoding="utf-8")


class AuditLog:
    """Lines go out as requests end."""

    def __init__(self, path: str, *, prompts: bool = False) -> None:
        """``path``: "-" for standard error. Raises ConfigError when the file cannot be written."""
        self._prompts = prompts
        self._failing = False
        try:
            self._handler = logging.StreamHandler(sys.stderr) if path == "-" else _File(path)
        except OSError as error:
            raise ConfigError("audit_log", f"{path}: {error.strerror or error}") from None

    def begin(self, request_id: str, client_id: str | None = None, endpoint: str = "other") -> Record:
        return Record(request_id, endpoint, client_id, self._prompts)

    def end(self, record: Record) -> None:
        """The request is over. A line that cannot be written is lost, and answers go on."""
        message = record.line().decode()
        try:
            self._handler.handle(logging.makeLogRecord({"msg": message}))
        except OSError as error:  # it was renamed, and cannot be opened again
            if not self._failing:
                log.error("the audit log cannot be written, lines are lost: %s", error)
            self._failing = True
        else:
            self._failing = False

    def close(self) -> None:
        self._handler.close()
