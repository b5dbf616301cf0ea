"""Results as JSON: all figures, settings, versions, and every request's times."""

from __future__ import annotations

import math
import platform
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import orjson

import baton
from baton.process.options import ConfigError

SECRETS = ("api_key",)


def check_writable(option: str, path: Path | None) -> None:
    """Check before a long run that its result can be written. Raises ConfigError."""
    if path is None:
        return
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(option, f"{path} is no file in a directory that exists")
    is_new = not path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise ConfigError(option, f"{path} cannot be written: {error.strerror}") from None
    if is_new:  # the run may fail before there is a result
        path.unlink()


def write_document(path: Path, kind: str, **parts: object) -> None:
    """Write a result. Parts may hold dataclasses; infinite numbers are written as text."""
    document = {
        "kind": kind,
        "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": {"baton": baton.__version__, "python": platform.python_version(), "system": sys.platform},
        **{name: _plain(orjson.loads(orjson.dumps(part, default=_other))) for name, part in parts.items()},
    }
    path.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2))


def told(number: float | None) -> float | str | None:
    """Return a number as JSON can hold it: infinities as text."""
    return str(number) if number is not None and math.isinf(number) else number


def _other(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _plain(value: object) -> object:
    """Return ``value`` without secrets, since result files are passed around."""
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items() if key not in SECRETS}
    return value
