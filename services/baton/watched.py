"""Noticing that files have changed. Imports nothing of Baton."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_Seen = tuple[int, int, int, int] | None


class WatchedFiles:
    """Files that are looked at from time to time.

    What is compared is what a name leads to: a file that is written anew, one that is renamed into place, and
    the symbolic link that a Kubernetes volume swaps are all changes. A file that is away for a moment is one
    too, when it is back.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = [Path(path) for path in paths]
        self._seen = self._look()

    def changed(self) -> bool:
        """Whether any of them is another than at the call before."""
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
