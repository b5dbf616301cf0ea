"""What a request may ask at most, and what the model behind it can hold."""

from __future__ import annotations

from dataclasses import dataclass

from baton.request.errors import invalid

MAX_ANSWERS = 128
"""To one prompt, that a worker takes; what a router allows may be less."""

MAX_BEAMS = 16
"""Of one search."""

MAX_TEMPERATURE = 2.0
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
MAX_REPETITION = 100.0
"""Of the repetition penalty; its inverse is the least. Both keep logits finite."""

MAX_LENGTH_PENALTY = 10.0
"""Either way. It keeps length ** penalty finite for any context."""

MAX_PROMPT_LOGPROBS = 2**18
"""Prompt tokens times log-probabilities told for each, the token's own included."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is known of the model that answers."""

    name: str
    revision: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int] = frozenset()
    takes_priorities: bool = False
    """Whether who computes schedules by priority."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationLimits:
    """Of the messages of one request, whatever its protocol calls them."""

    max_messages: int = 10_000
    max_parts: int = 10_000
    """Parts of all messages together: texts, calls of tools, what tools returned, thoughts."""


def check_at_most(param: str, what: str, given: int, most: int) -> None:
    """Raise RequestError when the field ``param`` has more than ``most`` of what it is made of."""
    if given > most:
        raise invalid(param, f"{param} has {given} {what}; at most {most} are allowed.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingLimits:
    """Limits of the sampling fields. Each bounds memory or work of one request."""

    max_stop_strings: int = 16
    max_stop_chars: int = 1024
    """Of one stop string."""
    max_stop_token_ids: int = 1024
    max_logprobs: int = 20
    """Likeliest tokens that can be told for one place."""
    max_prompt_logprobs: int = MAX_PROMPT_LOGPROBS
    max_logit_bias: int = 1024
    max_bad_words: int = 500
    max_bad_word_chars: int = 128
    """Of one bad word."""
