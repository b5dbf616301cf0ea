"""A log line about strangers, at most one in a while: what anyone may cause must not fill the log."""

from __future__ import annotations

import logging
import time

TELL_S = 10.0
"""The least time between two lines, in seconds."""


class RareLog:
    """Logs warnings of one kind, at most one in ``TELL_S``. The next line says how many were left out."""

    def __init__(self, log: logging.Logger, what: str) -> None:
        """``what``: the name of the things left out, in the plural."""
        self._log = log
        self._what = what
        self._told_at = -TELL_S
        self._untold = 0

    def warn(self, message: str, *args: object) -> None:
        now = time.monotonic()
        if now - self._told_at < TELL_S:
            self._untold += 1
            return
        more = f" (and {self._untold} more {self._what} since the last such line)" if self._untold else ""
        self._log.warning("%s%s", message % args, more)
        self._told_at, self._untold = now, 0
