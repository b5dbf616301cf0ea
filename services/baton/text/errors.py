"""Errors between text and tokens."""

from __future__ import annotations


class TokenizerError(Exception):
    """The model directory has no usable tokenizer; the message is one line for an operator."""


class TextTooLongError(ValueError):
    """A text exceeds a size limit, found before any work was spent on it."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"the text has {size} characters; at most {limit} are allowed")
        self.size = size
        self.limit = limit


class TooManyTokensError(ValueError):
    """A text has more tokens than allowed."""

    def __init__(self, limit: int, tokens: int | None = None) -> None:
        """``tokens``: the number of tokens; None: not all were counted."""
        told = f"more than {limit}" if tokens is None else str(tokens)
        super().__init__(f"the text has {told} tokens; at most {limit} are allowed")
        self.limit = limit
        self.told = told


class ChatTemplateError(ValueError):
    """The messages cannot be turned into a prompt: no template, or the template refuses them."""
