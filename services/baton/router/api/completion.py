"""One choice: tokens from the ring become text, and a stop string ends it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from baton.router.types import FinishReason, Ring, RingError, TokenChunk
from baton.sampling_params import SamplingParams
from baton.text.detokenizer import Detokenizer
from baton.text.stop import StopMatcher


@dataclass(frozen=True, slots=True)
class Delta:
    """What a chunk of tokens adds to a choice. ``text`` may be empty while a character or a stop string is
    incomplete; ``stop_reason`` is the stop string or stop token that ended the choice."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    cached_tokens: int = 0


class ChoiceText:
    """The text of one choice as its tokens arrive."""

    def __init__(self, params: SamplingParams, detokenizer: Detokenizer, matcher: StopMatcher | None) -> None:
        self._params = params
        self._detokenizer = detokenizer
        self._matcher = matcher

    def add(self, chunk: TokenChunk) -> Delta:
        """Take the next chunk. A delta with a finish reason ends the choice, whatever the ring says."""
        reason = chunk.finish_reason
        # The token that stops a sequence is part of its output, but not of its text.
        spoken = chunk.token_ids[:-1] if reason == "stop" else chunk.token_ids
        if self._matcher is not None:
            return self._searched(chunk, spoken, self._matcher)
        text = self._detokenizer.push(spoken)
        if reason is not None:
            text += self._detokenizer.finish()
        return self._delta(chunk, text)

    def _searched(self, chunk: TokenChunk, spoken: tuple[int, ...], matcher: StopMatcher) -> Delta:
        # One token at a time, so that the choice ends with the token that completes the stop string however
        # many tokens the ring sent at once.
        text = ""
        for used, token_id in enumerate(spoken, start=1):
            text += matcher.push(self._detokenizer.push((token_id,)))
            if matcher.matched is not None:
                return Delta(text, chunk.token_ids[:used], "stop", matcher.matched, chunk.cached_tokens)
        if chunk.finish_reason is not None:
            text += matcher.push(self._detokenizer.finish())
            if matcher.matched is not None:
                return Delta(text, chunk.token_ids, "stop", matcher.matched, chunk.cached_tokens)
            text += matcher.finish()
        return self._delta(chunk, text)

    def _delta(self, chunk: TokenChunk, text: str) -> Delta:
        stop_reason: int | None = None
        if chunk.finish_reason == "stop" and chunk.token_ids:
            last = chunk.token_ids[-1]
            stop_reason = last if last in self._params.stop_token_ids else None
        return Delta(text, chunk.token_ids, chunk.finish_reason, stop_reason, chunk.cached_tokens)


async def complete(
    ring: Ring, request_id: str, prompt_ids: list[int], params: SamplingParams, text: ChoiceText
) -> AsyncGenerator[Delta]:
    """Run one choice to its end. Closing the generator cancels it on the workers.

    Raises RingError when the ring does, or when it stops without saying why.
    """
    async with aclosing(ring.generate(request_id, prompt_ids, params)) as chunks:
        async for chunk in chunks:
            delta = text.add(chunk)
            if delta.finish_reason is not None:
                break
            yield delta
        else:
            raise RingError(502, "incomplete_answer", "The workers ended the answer before it was complete.")
    # Only now, with the ring's request closed: a worker must not go on while a slow client reads the end.
    yield delta
