"""What can go wrong between text and tokens."""

from __future__ import annotations


class TokenizerError(Exception):
    """The model directory has no usable tokenizer; the message is one line for an operator."""


class TextTooLongError(ValueError):
    """A text is over a size limit, found out before any work was spent on it."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"the text has {size} characters; at most {limit} are allowed")
        self.size = size
        self.limit = limit


class ChatTemplateError(ValueError):
    """The messages cannot be turned into a prompt: no template, or the template refuses them."""
