"""The log format of every service, and its reading back: ``baton up`` shows what its children warn of."""

from __future__ import annotations

import logging
import re
import sys

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_RECORD = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO|WARNING|ERROR|CRITICAL) (.*)")


def configure(level: str) -> None:
    """Send this process's logs to standard error (standard output belongs to ``baton.ready``)."""
    logging.basicConfig(stream=sys.stderr, level=level.upper(), format=_FORMAT, force=True)
    # One line per request to a hub, even where nothing is wrong, is not worth a person's attention.
    for chatty in ("httpx", "httpcore", "urllib3", "filelock"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


class LogReader:
    """Tells the level of each line of a service's standard error.

    A line that starts no record belongs to the record before it (a traceback). Before any record, it is from
    the interpreter or a library that died: an error.
    """

    def __init__(self) -> None:
        self._level = logging.ERROR
        self.last_error = ""

    def read(self, line: str) -> int:
        """The level of ``line``, which must come in order."""
        match = _RECORD.fullmatch(line)
        if match:
            self._level = logging.getLevelNamesMapping()[match[1]]
        elif line.startswith("error: "):  # how the command line ends a service that cannot go on
            self._level = logging.ERROR
        # A traceback's indented lines are how, its last line is what.
        if self._level >= logging.ERROR and line.strip() and not line.startswith((" ", "Traceback")):
            self.last_error = match[2] if match else line.removeprefix("error: ")
        return self._level
