"""What `LLM` gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from baton.logprobs import Logprobs
from baton.text.choice import FinishReason


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer to a prompt."""

    index: int
    """Among the ``n`` of its prompt."""
    text: str
    """Without the stop string that ended it."""
    token_ids: tuple[int, ...]
    """All that was generated, the token that ended it included."""
    finish_reason: FinishReason | Literal["error"]
    stop_reason: str | int | None = None
    """The stop string or stop token that ended it; None for the model's own end."""
    logprobs: Logprobs | None = None
    """Of the tokens, when the parameters asked."""
    error: str | None = None
    """Why it could not go on, with the finish reason "error"; what came before is here."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its answers."""

    prompt: str | None
    """As text; None when it was given as token ids."""
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: Logprobs | None = None
    """Of the prompt but its first token, when the parameters asked."""
    cached_tokens: int = 0
    """Of the prompt, found in the prefix cache."""
