"""One choice: its tokens become text, and a stop string ends it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from baton.logprobs import Logprobs, TokenDetails
from baton.sampling_params import SamplingParams
from baton.text.detokenizer import Detokenizer
from baton.text.stop import StopMatcher

FinishReason = Literal["stop", "length"]


class TokenChunk(NamedTuple):
    """Tokens of one request, in order, exactly once. The last chunk has ``finish_reason`` set.

    ``cached_tokens`` (prompt tokens found in a prefix cache) comes with the first chunk. ``details`` is what
    the request asked to be told besides; None: nothing.
    """

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    details: TokenDetails | None = None
    attempt: int = 0
    """Which brought them."""


@dataclass(frozen=True, slots=True)
class DeltaDetails:
    """What a client asked to be told of a delta besides."""

    logprobs: Logprobs | None = None
    """Of the delta's tokens."""
    offsets: tuple[int, ...] = ()
    """With ``logprobs``: the character of the choice's text in which each token begins."""
    prompt_logprobs: Logprobs | None = None
    """With the first delta: of the prompt but its first token."""


class Delta(NamedTuple):
    """What a chunk of tokens adds to a choice. ``text`` may be empty while a character or a stop string is
    incomplete; ``stop_reason`` is the stop string or stop token that ended the choice."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    cached_tokens: int = 0
    details: DeltaDetails | None = None


class ChoiceText:
    """The text of one choice as its tokens arrive."""

    def __init__(
        self,
        params: SamplingParams,
        detokenizer: Detokenizer,
        matcher: StopMatcher | None,
        *,
        echo: str = "",
        only_echo: bool = False,
    ) -> None:
        """``echo`` begins the text; with ``only_echo`` nothing follows it, whatever tokens come."""
        self._params = params
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._echo = echo
        self._only_echo = only_echo
        self._plain = matcher is None and not echo and not only_echo
        # Of the text, stop strings included, and of the outputs; kept where tokens are taken one by one.
        self._num_chars = len(echo)
        self._num_tokens = 0

    def add(self, chunk: TokenChunk) -> Delta:
        """Take the next chunk. A delta with a finish reason ends the choice, whatever the chunk says."""
        if self._plain and chunk.details is None and chunk.finish_reason is None:
            text = self._detokenizer.push(chunk.token_ids)
            return Delta(text, chunk.token_ids, None, None, chunk.cached_tokens)
        if self._only_echo:
            return self._delta(chunk, self._echo, (), 0, "length")
        delta = self._taken(chunk)
        if self._echo:
            delta = delta._replace(text=self._echo + delta.text)
            self._echo = ""
        return delta

    def _taken(self, chunk: TokenChunk) -> Delta:
        """One token at a time, so that the choice ends with the token that completes a stop string however
        many came at once, and it is known where each token begins."""
        reason = chunk.finish_reason
        # The token that stops a sequence is part of its output, but not of its text.
        spoken = chunk.token_ids[:-1] if reason == "stop" else chunk.token_ids
        text = ""
        offsets: list[int] = []
        for used, token_id in enumerate(spoken, start=1):
            offsets.append(self._num_chars)
            self._num_tokens += 1
            text += self._searched(self._detokenizer.push((token_id,)))
            if self._matched is not None:
                return self._delta(chunk, text, offsets, used, "stop", self._matched)
        if reason is None:
            return self._delta(chunk, text, offsets, len(spoken), None)
        text += self._searched(self._detokenizer.finish())
        if self._matcher is not None:
            text += self._matcher.finish()
        offsets.append(self._num_chars)
        if self._matched is not None:
            return self._delta(chunk, text, offsets, len(chunk.token_ids), "stop", self._matched)
        stopped_by = chunk.token_ids[-1] if len(spoken) < len(chunk.token_ids) else None
        stop_reason = stopped_by if stopped_by in self._params.stop_token_ids else None
        return self._delta(chunk, text, offsets, len(chunk.token_ids), reason, stop_reason)

    @property
    def _matched(self) -> str | None:
        return None if self._matcher is None else self._matcher.matched

    def _searched(self, text: str) -> str:
        """What is safe to send once ``text`` has come: no stop string ends the first ``min_tokens``."""
        self._num_chars += len(text)
        if self._matcher is None:
            return text
        return self._matcher.push(text, may_match=self._num_tokens > self._params.min_tokens)

    @staticmethod
    def _delta(
        chunk: TokenChunk,
        text: str,
        offsets: Sequence[int],
        used: int,
        reason: FinishReason | None,
        stop_reason: str | int | None = None,
    ) -> Delta:
        """The delta of the first ``used`` tokens of ``chunk``."""
        details: DeltaDetails | None = None
        if chunk.details is not None:
            logprobs = chunk.details.logprobs
            details = DeltaDetails(
                None if logprobs is None else logprobs[:used],
                () if logprobs is None else tuple(offsets[:used]),
                chunk.details.prompt_logprobs,
            )
        return Delta(text, chunk.token_ids[:used], reason, stop_reason, chunk.cached_tokens, details)
