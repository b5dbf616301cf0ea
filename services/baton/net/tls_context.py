"""Objects made from certificate files, and remade when the files change."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic, TypeVar

from baton.net.certificates import TlsFiles
from baton.process.options import ConfigError

log = logging.getLogger(__name__)

T = TypeVar("T")


class FollowedFiles(Generic[T]):
    """Certificate files, and in ``now`` what ``make`` returned when the files could last be used."""

    def __init__(self, files: TlsFiles, make: Callable[[], T]) -> None:
        """Raises what ``make`` raises: ConfigError when the files cannot be used."""
        self._files = files
        self._watch = files.watch()
        self._make = make
        self.now = make()

    def follow(self) -> bool:
        """Check the files for changes. Returns whether ``now`` is new."""
        if not self._watch.changed():
            return False
        try:
            self.now = self._make()
        except ConfigError as error:
            log.error("certificates have changed and cannot be used, those before are kept: %s", error)
            return False
        log.info("%s is read again", self._files.certificate)
        return True
