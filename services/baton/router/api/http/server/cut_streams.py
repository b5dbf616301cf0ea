"""The log of a drain whose time is over: one line, however many streams it cuts."""

from __future__ import annotations

import asyncio
import logging


class CutStreams(logging.Filter):
    """A filter for uvicorn's log, which says how many requests it cancels, and then writes a traceback for
    each, as if it had failed."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.exc_info is None or not isinstance(record.exc_info[1], asyncio.CancelledError)
