"""Why a request's grammar cannot be used."""

from __future__ import annotations


class GrammarError(ValueError):
    """The grammar is invalid or goes beyond the limits. The message is one line for the client."""


class GrammarBusyError(GrammarError):
    """The grammar may be fine: it could not be compiled here and now."""
