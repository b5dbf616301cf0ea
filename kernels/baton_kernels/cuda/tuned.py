"""Tile sizes that were measured to be best on a device, where that has been done.

``python -m loadtest.kernels --tune`` writes a file for the device that it runs on. Files are read from two
places, and the second overrides the first for a shape that both have:

- ``baton_kernels/cuda/tilings/``, which is shipped;
- ``$BATON_CACHE_DIR/kernels``, or ``$XDG_CACHE_HOME/baton/kernels``, or ``~/.cache/baton/kernels``.

A file holds the device's name and, by the name of a shape, rows, tile, warps and stages. A file with other
content is an error: with arbitrary sizes, a kernel may be slow or not fit.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from types import MappingProxyType

log = logging.getLogger(__name__)

SHIPPED = Path(__file__).parent / "tilings"
ALLOWED: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        "rows": (16, 32, 64, 128),
        "tile": (16, 32, 64, 128),
        "warps": (1, 2, 4, 8, 16),
        "stages": tuple(range(1, 9)),
    }
)
_SHAPE = re.compile(
    r"(decode|prefill) of (16|32|64|128) rows, head_dim \d+, group \d+, blocks of \d+, \w+, arch \d+|"
    r"(gate_up|down) of (16|32|64|128) rows, hidden \d+, inner \d+, \d+ experts, \w+, arch \d+"
)


class TuningError(ValueError):
    """A file of tile sizes cannot be used. The message names the file and the fault."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """Rows of queries, keys per tile, and the compiler's warps and stages. For experts, rows of pairs, and
    columns of a tile."""

    rows: int
    tile: int
    warps: int
    stages: int


NONE: Mapping[str, Tiling] = MappingProxyType({})


def cache_directory() -> Path:
    """The directory of tile sizes tuned on this machine."""
    own = os.environ.get("BATON_CACHE_DIR")
    if own:
        return Path(own) / "kernels"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton" / "kernels"


def file_name(device: str) -> str:
    """The name of a device's file. ``device``: the driver's name of it, such as "NVIDIA H200"."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") + ".json"


@cache
def tilings_of(device: str) -> Mapping[str, Tiling]:
    """The best tilings measured on ``device``, by shape. Read once. TuningError for an unusable file."""
    if not device:
        return NONE
    found: dict[str, Tiling] = {}
    for directory in (SHIPPED, cache_directory()):
        path = directory / file_name(device)
        if path.is_file():
            read_tilings = read(path, device)
            log.info("kernels: %d tuned shapes from %s", len(read_tilings), path)
            found |= read_tilings
    if not found:
        log.info("kernels: nothing was tuned on %s, so tile sizes are the defaults", device)
    return MappingProxyType(found)


def read(path: Path, device: str) -> dict[str, Tiling]:
    """The tile sizes in a file, which must be of ``device``."""
    try:
        content: object = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise TuningError(f"{path}: not a file of tile sizes: {error}") from error
    if not isinstance(content, dict) or set(content) != {"device", "tilings"}:
        raise TuningError(f"{path}: allowed is an object of device and tilings")
    if content["device"] != device:
        raise TuningError(f"{path}: device is {content['device']!r}; allowed: {device!r}")
    tilings = content["tilings"]
    if not isinstance(tilings, dict):
        raise TuningError(f"{path}: tilings is {tilings!r}; allowed: an object, shape to tile sizes")
    return {shape: _tiling(path, shape, value) for shape, value in tilings.items()}


def _tiling(path: Path, shape: str, value: object) -> Tiling:
    if not _SHAPE.fullmatch(shape):
        raise TuningError(f"{path}: {shape!r} is no shape; allowed: as `loadtest.kernels --tune` writes them")
    names = [field.name for field in fields(Tiling)]
    if not isinstance(value, dict) or set(value) != set(names):
        raise TuningError(f"{path}: {shape}: {value!r}; allowed: an object of {', '.join(names)}")
    for name in names:
        if type(value[name]) is not int or value[name] not in ALLOWED[name]:
            allowed = ", ".join(map(str, ALLOWED[name]))
            raise TuningError(f"{path}: {shape}: {name} is {value[name]!r}; allowed: {allowed}")
    return Tiling(**value)


def write(path: Path, device: str, tilings: Mapping[str, Tiling]) -> None:
    """Writes a file that :func:`read` takes, whole or not at all."""
    content = {"device": device, "tilings": {shape: asdict(t) for shape, t in sorted(tilings.items())}}
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(content, indent=2) + "\n")
    new.replace(path)
