"""One streamed answer, event by event: when tokens came, and how many."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from baton.bench.record import RequestFailure, TokenArrival


class _Choice(msgspec.Struct):
    text: str | None = None
    token_ids: list[int] | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Error(msgspec.Struct):
    message: str = ""
    code: str | int | None = None
    type: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


_DECODER = msgspec.json.Decoder(_Event)


@dataclass(slots=True)
class PartialAnswer:
    """What has arrived of an answer. A chunk's tokens are those of its ``token_ids``; a chunk with text but
    without ids is one arrival of unknown count. The totals are the server's usage."""

    arrivals: list[TokenArrival] = field(default_factory=list)
    counted: bool = True
    """Whether each chunk reported its token ids."""
    usage: _Usage | None = None
    error: _Error | None = None

    def take(self, data: bytes, at: float) -> None:
        """Take one event that arrived at ``at``. Raises msgspec.MsgspecError when it is not a completion's
        chunk."""
        event = _DECODER.decode(data)
        self.usage = event.usage or self.usage
        self.error = event.error or self.error
        for choice in event.choices:
            if choice.token_ids:
                self.arrivals.append(TokenArrival(at, len(choice.token_ids)))
            elif choice.token_ids is None and choice.text:
                self.counted = False
                self.arrivals.append(TokenArrival(at, 1))

    @property
    def output_tokens(self) -> int:
        """The output tokens by the server's usage, or by its chunks where it reports none."""
        if self.usage is not None:
            return self.usage.completion_tokens
        return sum(arrival.tokens for arrival in self.arrivals)

    @property
    def cached_tokens(self) -> int:
        details = self.usage.prompt_tokens_details if self.usage else None
        return (details.cached_tokens if details else None) or 0

    def failure(self, ended: bool) -> RequestFailure | None:
        """Return why the answer is not whole, or None; ``ended``: the stream was closed in order."""
        if self.error is not None:
            kind = self.error.code or self.error.type or "server_error"
            return RequestFailure(str(kind), self.error.message)
        if not ended:
            return RequestFailure("cut_off", "the stream ended without [DONE]")
        if not self.arrivals:
            return RequestFailure("empty", "the answer has no token")
        if self.usage is None and not self.counted:
            return RequestFailure(
                "no_usage", "the server tells neither usage nor token ids: nothing can be counted"
            )
        return None
