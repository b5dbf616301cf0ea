"""What is made of certificate files, made anew when they change."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic, TypeVar

from baton.options import ConfigError
from baton.tls.files import TlsFiles

log = logging.getLogger(__name__)

T = TypeVar("T")


class FollowedFiles(Generic[T]):
    """``now`` is what ``make`` made when the files could be used last."""

    def __init__(self, files: TlsFiles, make: Callable[[], T]) -> None:
        """Raises what ``make`` does: ConfigError when the files cannot be used."""
        self._files = files
        self._watch = files.watch()
        self._make = make
        self.now = make()

    def follow(self) -> bool:
        """Look at the files. Whether there is something new."""
        if not self._watch.changed():
            return False
        try:
            self.now = self._make()
        except ConfigError as error:
            log.error("certificates have changed and cannot be used, those before are kept: %s", error)
            return False
        log.info("%s is read again", self._files.certificate)
        return True
