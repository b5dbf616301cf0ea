"""One streamed answer, event by event: when tokens came, and how many."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from baton.bench.record import Arrival, Failure


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
class Answer:
    """What has come of an answer so far. Tokens of a chunk are those of its ``token_ids``; a chunk that has
    none, but text, is one arrival of unknown count. The whole's counts are the server's usage."""

    arrivals: list[Arrival] = field(default_factory=list)
    counted: bool = True
    """Whether each chunk told its tokens."""
    usage: _Usage | None = None
    error: _Error | None = None

    def take(self, data: bytes, at: float) -> None:
        """One event that came at ``at``. Raises msgspec.MsgspecError when it is not a completion's chunk."""
        event = _DECODER.decode(data)
        self.usage = event.usage or self.usage
        self.error = event.error or self.error
        for choice in event.choices:
            if choice.token_ids:
                self.arrivals.append(Arrival(at, len(choice.token_ids)))
            elif choice.token_ids is None and choice.text:
                self.counted = False
                self.arrivals.append(Arrival(at, 1))

    @property
    def output_tokens(self) -> int:
        """As the server's usage has it; without one, as its chunks do."""
        if self.usage is not None:
            return self.usage.completion_tokens
        return sum(arrival.tokens for arrival in self.arrivals)

    @property
    def cached_tokens(self) -> int:
        details = self.usage.prompt_tokens_details if self.usage else None
        return (details.cached_tokens if details else None) or 0

    def failure(self, ended: bool) -> Failure | None:
        """Why this is no whole answer; ``ended``: the stream was closed in order."""
        if self.error is not None:
            kind = self.error.code or self.error.type or "server_error"
            return Failure(str(kind), self.error.message)
        if not ended:
            return Failure("cut_off", "the stream ended without [DONE]")
        if not self.arrivals:
            return Failure("empty", "the answer has no token")
        if self.usage is None and not self.counted:
            return Failure("no_usage", "the server tells neither usage nor token ids: nothing can be counted")
        return None
