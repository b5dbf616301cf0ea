"""The limits of a request, and of the model behind it."""

from __future__ import annotations

from dataclasses import dataclass

from baton.request.errors import invalid

MAX_ANSWERS = 128
"""Most answers to one prompt that a worker takes; a router may allow fewer."""

MAX_BAD_WORDS = 2048
"""Most runs of bad words of a request that a worker takes. A router makes up to two of a word, and takes as
many runs as words."""

MAX_BAD_WORD_TOKENS = 2**17
"""Most tokens of all runs of bad words of a request. The automaton that finds them has fewer states."""

MAX_PROMPT_LOGPROBS = 2**18
"""Most log-probabilities of a prompt: tokens times log-probabilities for each, the token's own included."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The properties of the model that answers."""

    name: str
    revision: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int] = frozenset()
    takes_priorities: bool = False
    """Whether the engine schedules by priority."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationLimits:
    """Limits of the messages of one request, whatever its protocol calls them."""

    max_messages: int = 10_000
    max_parts: int = 10_000
    """Most parts of all messages together: texts, tool calls, results of tools, reasoning."""


def check_at_most(param: str, what: str, given: int, most: int) -> None:
    """Raise RequestError when the field ``param`` has more than ``most`` items, which ``what`` names."""
    if given > most:
        raise invalid(param, f"{param} has {given} {what}; at most {most} are allowed.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingLimits:
    """Limits of the sampling fields. Each bounds memory or work of one request."""

    max_stop_strings: int = 16
    max_stop_chars: int = 1024
    """Most characters of one stop string."""
    max_stop_token_ids: int = 1024
    max_logprobs: int = 20
    """Most likeliest tokens reported for one position."""
    max_prompt_logprobs: int = MAX_PROMPT_LOGPROBS
    max_logit_bias: int = 1024
    max_bad_words: int = 500
    max_bad_word_chars: int = 128
    """Most characters of one bad word."""
    max_bad_word_tokens: int = MAX_BAD_WORD_TOKENS
    """Most tokens of all bad words together, with and without a space before each."""
