"""The log format of every service, and its parsing: ``baton up`` shows the warnings of its children."""

from __future__ import annotations

import logging
import re
import sys

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_RECORD = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO|WARNING|ERROR|CRITICAL) (.*)")


def configure(level: str) -> None:
    """Send this process's logs to standard error (standard output belongs to ``baton.process.ready``)."""
    logging.basicConfig(stream=sys.stderr, level=level.upper(), format=_FORMAT, force=True)
    # These libraries log a line per request to a hub, even where nothing is wrong.
    for chatty in ("httpx", "httpcore", "urllib3", "filelock"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


class LogReader:
    """Tells the level of each line of a service's standard error.

    A line that starts no record belongs to the record before it (a traceback). A line before any record is an
    error: it comes from an interpreter or library that died.
    """

    def __init__(self) -> None:
        self._level = logging.ERROR
        self.last_error = ""

    def read(self, line: str) -> int:
        """Return the level of ``line``. Lines must be read in order."""
        match = _RECORD.fullmatch(line)
        if match:
            self._level = logging.getLevelNamesMapping()[match[1]]
        elif line.startswith("error: "):  # how the command line ends a service that cannot go on
            self._level = logging.ERROR
        # A traceback's last line, which is not indented, is the error.
        if self._level >= logging.ERROR and line.strip() and not line.startswith((" ", "Traceback")):
            self.last_error = match[2] if match else line.removeprefix("error: ")
        return self._level
