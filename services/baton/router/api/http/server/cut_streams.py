"""The log of a drain whose time is over: one line, however many streams it cuts."""

from __future__ import annotations

import asyncio
import logging


class CutStreams(logging.Filter):
    """A filter for uvicorn's log, which writes a traceback for each request that is cancelled, as if it had
    failed. The server itself says how many they are."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.exc_info is None or not isinstance(record.exc_info[1], asyncio.CancelledError)
