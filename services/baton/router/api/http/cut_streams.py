"""What a drain that is over leaves in the log: one line, whatever number of streams it cuts."""

from __future__ import annotations

import asyncio
import logging


class CutStreams(logging.Filter):
    """For uvicorn's log. It says how many requests it cancels, and then writes a traceback for each of them,
    as if they had failed."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.exc_info is None or not isinstance(record.exc_info[1], asyncio.CancelledError)
