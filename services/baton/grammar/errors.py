"""The reasons why a request's grammar cannot be used."""

from __future__ import annotations


class GrammarError(ValueError):
    """The grammar is invalid or exceeds the limits. The message is one line for the client."""


class GrammarBusyError(GrammarError):
    """The grammar may be valid, but could not be compiled here and now."""


class GrammarLimitError(GrammarBusyError):
    """The tenant has had as many trials as it may have for now; other tenants go on."""

    def __init__(self, reason: str, retry_after_s: float) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s
