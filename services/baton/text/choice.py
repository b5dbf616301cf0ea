"""The text of one choice: its tokens become text, and a stop string ends it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from baton.core.logprobs import Logprobs, TokenDetails
from baton.core.sampling_params import ResolvedSampling
from baton.text.detokenizer import REPLACEMENT, Detokenizer, NoText
from baton.text.stop import StopMatcher

FinishReason = Literal["stop", "length"]


class TokenChunk(NamedTuple):
    """Tokens of one request, in order, exactly once. The last chunk has ``finish_reason`` set.

    ``cached_tokens`` (prompt tokens found in a prefix cache) comes with the first chunk. ``details`` holds
    the other data that the request asks for, such as log-probabilities; None: nothing.
    """

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    details: TokenDetails | None = None
    attempt: int = 0
    """The attempt that generated the tokens."""


@dataclass(frozen=True, slots=True)
class DeltaDetails:
    """The data that a client asks for besides a delta's text and tokens."""

    logprobs: Logprobs | None = None
    """Log-probabilities of the delta's tokens."""
    offsets: tuple[int, ...] = ()
    """The character of the choice's text in which each token begins; only with ``logprobs``."""
    prompt_logprobs: Logprobs | None = None
    """Log-probabilities of the prompt's tokens but the first one; only with the first delta."""


class Delta(NamedTuple):
    """The text and tokens that a chunk adds to a choice. ``text`` may be empty while a character or a stop
    string is incomplete; ``stop_reason`` is the stop string or stop token that ended the choice."""

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
        params: ResolvedSampling,
        detokenizer: Detokenizer | NoText,
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
        self._num_replaced = 0
        """Replacement characters at the end of the text, which are not told before another character comes: a
        character that the answer's end cuts off is left out."""
        self._plain = matcher is None and not echo and not only_echo
        # Characters of the text, stop strings included, and output tokens; counted only where tokens are
        # taken one by one.
        self._num_chars = len(echo)
        self._num_tokens = 0

    def add(self, chunk: TokenChunk) -> Delta:
        """Take the next chunk. A delta with a finish reason ends the choice, even if the chunk does not."""
        if self._plain and chunk.details is None and chunk.finish_reason is None:
            text = self._settled(self._detokenizer.push(chunk.token_ids))
            return Delta(text, chunk.token_ids, None, None, chunk.cached_tokens)
        if self._only_echo:
            return self._delta(chunk, self._echo, (), 0, "length")
        delta = self._taken(chunk)
        if self._echo:
            delta = delta._replace(text=self._echo + delta.text)
            self._echo = ""
        return delta

    def _taken(self, chunk: TokenChunk) -> Delta:
        """Take the tokens one by one, so that the choice ends with the token that completes a stop string,
        however many came at once, and each token's offset is known."""
        reason = chunk.finish_reason
        stopped_by = chunk.token_ids[-1] if reason == "stop" and chunk.token_ids else None
        # The token that stops a sequence is part of its output, but not of its text, unless it is asked for.
        silent = stopped_by is not None and not self._params.include_stop_str_in_output
        spoken = chunk.token_ids[:-1] if silent else chunk.token_ids
        text = ""
        offsets: list[int] = []
        for used, token_id in enumerate(spoken, start=1):
            offsets.append(self._num_chars)
            self._num_tokens += 1
            text += self._searched(self._settled(self._detokenizer.push((token_id,))))
            if self._matched is not None:
                return self._delta(chunk, text, offsets, used, "stop", self._matched)
        if reason is None:
            return self._delta(chunk, text, offsets, len(spoken), None)
        text += self._searched(self._settled(self._detokenizer.finish()))
        if self._matcher is not None:
            text += self._matcher.finish()
        offsets.append(self._num_chars)
        if self._matched is not None:
            return self._delta(chunk, text, offsets, len(chunk.token_ids), "stop", self._matched)
        stop_reason = stopped_by if stopped_by in self._params.stop_token_ids else None
        return self._delta(chunk, text, offsets, len(chunk.token_ids), reason, stop_reason)

    def _settled(self, text: str) -> str:
        """Return ``text`` without the replacement characters at its end, and with those held back before."""
        if text[-1:] != REPLACEMENT and not (text and self._num_replaced):
            return text
        whole = text.rstrip(REPLACEMENT)
        replaced, self._num_replaced = self._num_replaced, len(text) - len(whole)
        if whole:
            return REPLACEMENT * replaced + whole
        self._num_replaced += replaced
        return ""

    @property
    def _matched(self) -> str | None:
        return None if self._matcher is None else self._matcher.matched

    def _searched(self, text: str) -> str:
        """Return the text that is safe to send after ``text``: no stop string ends within the first
        ``min_tokens``."""
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
        """Return the delta of the first ``used`` tokens of ``chunk``."""
        details: DeltaDetails | None = None
        if chunk.details is not None:
            logprobs = chunk.details.logprobs
            details = DeltaDetails(
                None if logprobs is None else logprobs[:used],
                () if logprobs is None else tuple(offsets[:used]),
                chunk.details.prompt_logprobs,
            )
        return Delta(text, chunk.token_ids[:used], reason, stop_reason, chunk.cached_tokens, details)
