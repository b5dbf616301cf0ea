"""A ring without workers: the tokens it answers with are known beforehand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from baton.core.logprobs import Logprobs, TokenDetails
from baton.core.priority import NO_PRIORITY, Priority
from baton.core.sampling_params import ResolvedSampling
from baton.router.dispatch.types import FinishReason, ModelInfo, Request, RingError, TokenChunk

EOS = 0

MODEL = ModelInfo(
    name="tiny",
    revision="0123456789abcdef",
    max_model_len=256,
    vocab_size=401,
    eos_token_ids=frozenset({EOS}),
)


@dataclass
class Call:
    """One request the ring was given, and what became of it."""

    request_id: str
    prompt_ids: list[int]
    params: ResolvedSampling
    priority: Priority = NO_PRIORITY
    delivered: int = 0
    finished: bool = False
    closed: bool = False
    """Closed before it was finished: cancelled."""


@dataclass
class FakeRing:
    """Answers every request with ``answer(call)``, ``per_chunk`` tokens at a time, ``delay`` seconds apart.

    Each answer ends with the end-of-sequence token when ``ends`` (and there is room), else at ``max_tokens``,
    going round. ``error`` is raised for the choices in ``failing`` (None: all) after ``fail_after`` tokens.
    """

    answer: Callable[[Call], Sequence[int]]
    model: ModelInfo | None = MODEL
    ready: bool = True
    stale: bool = False
    per_chunk: int = 1
    delay: float = 0.0
    ends: bool = False
    error: Exception | None = None
    fail_after: int = 0
    failing: Sequence[int] | None = None
    cached_tokens: int = 0
    calls: list[Call] = field(default_factory=list)
    unlinked: Mapping[str, int] = field(default_factory=dict)

    def unlinked_pairs(self) -> Mapping[str, int]:
        return self.unlinked

    @contextmanager
    def generate(
        self, prompt_ids: list[int], requests: Sequence[Request], priority: Priority = NO_PRIORITY
    ) -> Iterator[Sequence[AsyncGenerator[TokenChunk]]]:
        yield [self._answer(each.request_id, prompt_ids, each.params, priority) for each in requests]

    async def _answer(
        self, request_id: str, prompt_ids: list[int], params: ResolvedSampling, priority: Priority
    ) -> AsyncGenerator[TokenChunk]:
        call = Call(request_id, prompt_ids, params, priority)
        self.calls.append(call)
        try:
            for chunk in self._chunks(call):
                if self.delay:
                    await asyncio.sleep(self.delay)
                self._maybe_fail(call)
                # Before the chunk is out: after a last chunk a consumer need not come back.
                call.delivered += len(chunk.token_ids)
                call.finished = chunk.finish_reason is not None
                yield chunk
        finally:
            call.closed = not call.finished

    def _chunks(self, call: Call) -> list[TokenChunk]:
        tokens, reason = self._tokens(call)
        chunks = [tokens[i : i + self.per_chunk] for i in range(0, len(tokens), self.per_chunk)]
        return [
            TokenChunk(
                token_ids=tuple(chunk),
                finish_reason=reason if index == len(chunks) - 1 else None,
                cached_tokens=self.cached_tokens if index == 0 else 0,
                details=details_of(call, chunk, first=index == 0),
            )
            for index, chunk in enumerate(chunks)
        ]

    def _tokens(self, call: Call) -> tuple[list[int], FinishReason]:
        answer = list(self.answer(call))
        room = call.params.max_tokens
        if self.ends and len(answer) < room:
            return [*answer, EOS], "stop"
        rounds = -(-room // len(answer))
        return (answer * rounds)[:room], "length"

    def _maybe_fail(self, call: Call) -> None:
        index = int(call.request_id.rpartition("-")[2])
        chosen = self.failing is None or index in self.failing
        if self.error is not None and chosen and call.delivered >= self.fail_after:
            raise self.error

    @property
    def cancelled(self) -> list[Call]:
        """The calls that were closed before they were finished."""
        return [call for call in self.calls if call.closed]


def details_of(call: Call, token_ids: Sequence[int], *, first: bool) -> TokenDetails | None:
    """What ``call`` asks to be told of some of its tokens."""
    num_top = call.params.logprobs
    num_prompt = call.params.prompt_logprobs if first else None
    if num_top is None and num_prompt is None:
        return None
    return TokenDetails(
        None if num_top is None else made_up(token_ids, num_top),
        None if num_prompt is None else made_up(call.prompt_ids[1:], num_prompt),
    )


def made_up(token_ids: Sequence[int], num_top: int) -> Logprobs:
    """Log-probabilities that follow from the tokens alone. A token with an even id is the likeliest; one with
    an odd id has rank 30, behind its successors."""
    chosen = [-0.25 if token % 2 == 0 else -token / 8 - 5 for token in token_ids]
    top_ids = [(token + token % 2 + i) % MODEL.vocab_size for token in token_ids for i in range(num_top)]
    top = [-0.25 - i / 4 for _ in token_ids for i in range(num_top)]
    return Logprobs(num_top, chosen, [1 if token % 2 == 0 else 30 for token in token_ids], top_ids, top)


def busy() -> RingError:
    """What a ring says that has no room."""
    return RingError(503, "no_capacity", "No worker has room for this request.")
