"""The results of `LLM`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from baton.core.logprobs import Logprobs
from baton.text.choice import FinishReason


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer to a prompt."""

    index: int
    """The answer's index among the ``n`` of its prompt."""
    text: str
    """The answer's text, without the stop string that ended it."""
    token_ids: tuple[int, ...]
    """All generated tokens, the token that ended the answer included."""
    finish_reason: FinishReason | Literal["error"]
    stop_reason: str | int | None = None
    """The stop string or stop token that ended the answer; None for the model's own end."""
    logprobs: Logprobs | None = None
    """Log-probabilities of the tokens, when the parameters asked."""
    error: str | None = None
    """The reason why the answer could not go on, with the finish reason "error"; text and tokens up to there
    are kept."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its answers."""

    prompt: str | None
    """The prompt's text; None when the prompt was given as token ids."""
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: Logprobs | None = None
    """Log-probabilities of the prompt's tokens but the first, when the parameters asked."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
