"""Detection of changed files. Imports nothing of Baton."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_Seen = tuple[int, int, int, int] | None


class WatchedFiles:
    """Files that are polled for changes.

    A change is any change of the file that a name resolves to: a file that is rewritten, a file that is
    renamed into place, and a symbolic link that a Kubernetes volume swaps. A file that was missing for a
    while has changed, too.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = [Path(path) for path in paths]
        self._seen = self._look()

    def changed(self) -> bool:
        """Whether any of the files has changed since the last call."""
        now = self._look()
        changed, self._seen = now != self._seen, now
        return changed

    def _look(self) -> list[_Seen]:
        return [_identity(path) for path in self._paths]


def _identity(path: Path) -> _Seen:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size
