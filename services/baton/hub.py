"""Finding a model's files, and a short name for their contents. No torch: the router uses it too."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import BinaryIO

from baton.process.bounded_json import parse_json
from baton.process.options import ModelError

DEMO = "demo"
TEXT_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
WEIGHT_FILES = ("*.safetensors",)
# Folders hold other formats of the same weights; consolidated*.safetensors are Mistral's own names for them.
SKIPPED_FILES = ("*/*", "consolidated*")

_SAMPLES = 16
_SAMPLE_BYTES = 4096
_FARTHEST = 2**62
"""A place behind the end of any file."""
_KV_SCALES = ("k_scale", "v_scale", "kv_scale", "k_proj.output_scale", "v_proj.output_scale")
"""Ends of the names of the scales of K and V."""
MOST_HEADER_BYTES = 100_000_000
"""The size of the largest header of a safetensors file; the format's own bound."""


def is_hub_id(name: str) -> bool:
    """Whether ``name`` means a model of the hub: neither "demo" nor anything of this machine."""
    return name != DEMO and not Path(name).expanduser().exists() and not looks_like_path(name)


def resolve_model(
    name: str,
    *,
    revision: str | None = None,
    weights: bool = True,
    fetch: bool = True,
    bar: type | None = None,
) -> Path:
    """The directory that holds the model ``name``: "demo", a local directory, or a hub id (fetched).

    ``revision`` (branch, tag or commit), ``weights`` (False: config and tokenizer only) and ``fetch`` (False:
    what the local cache has of it, nothing is downloaded) apply to hub ids.
    ``bar``: the class of the bars that show a download, as tqdm's; None: the hub's own, on a terminal alone.

    Raises ModelError, one line, when there is no such directory or the hub does not give it.
    """
    if name == DEMO:
        return _demo_model()
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ModelError(f"{name}: is a file; a model is a directory with config.json and *.safetensors")
    if looks_like_path(name):
        raise ModelError(f"{name}: no such directory")
    return _download(name, revision, weights, fetch, bar)


def revision_of(path: Path) -> str:
    """16 hex digits that name the contents of a model directory.

    Two workers may exchange KV only if these agree. Hashed are config.json and, of each safetensors file,
    its name, size and header (which names every tensor) and samples spread over the data, so that two
    fine-tunes of one model differ; reading whole files would take minutes. The scales of K and V are hashed
    whole: calibration changes nothing else. ModelError for a file without a whole header.
    """
    digest = hashlib.sha256()
    config = path / "config.json"
    if not config.is_file():
        raise ModelError(f"{path}: no config.json in this directory")
    digest.update(config.read_bytes())
    for file in sorted(path.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"\0{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            described = _header_of(file, stream)
            header = len(described)
            digest.update(header.to_bytes(8, "little"))
            digest.update(described)
            digest.update(_kv_scales(stream, described))
            for sample in range(_SAMPLES):
                stream.seek(8 + header + (size - 8 - header) * sample // _SAMPLES)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def kv_scales_digest(path: Path) -> str:
    """16 hex digits that name the scales of K and V in a model directory; "": it has none. ModelError for a
    file without a whole header."""
    found = b""
    for file in sorted(path.glob("*.safetensors")):
        with file.open("rb") as stream:
            found += _kv_scales(stream, _header_of(file, stream))
    return hashlib.sha256(found).hexdigest()[:16] if found else ""


def _header_of(file: Path, stream: BinaryIO) -> bytes:
    try:
        return read_header(stream)
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: truncated or corrupt ({error})") from error


def read_header(stream: BinaryIO) -> bytes:
    """The header of the safetensors file that ``stream`` is at the begin of; the stream is behind it then.

    ValueError, and nothing is read, if the file is too small for the header that it tells of, or the header
    is larger than ``MOST_HEADER_BYTES``."""
    size = os.fstat(stream.fileno()).st_size
    length = int.from_bytes(stream.read(8), "little")
    if size < 8 or length > min(size - 8, MOST_HEADER_BYTES):
        raise ValueError(f"the header has {length} bytes, the file {size}")
    return stream.read(length)


def _kv_scales(stream: BinaryIO, header: bytes) -> bytes:
    """Return the scales of K and V in a safetensors file with this header, as they are there. Scales of more
    than a few bytes are none of these."""
    if b"_scale" not in header:
        return b""
    try:
        described = parse_json(header)
    except ValueError:
        return b""  # whoever loads the file says what is wrong with it
    found = b""
    for start, stop in sorted(_small_scales(described)):
        stream.seek(8 + len(header) + start)
        found += stream.read(stop - start)
    return found


def _small_scales(described: object) -> Iterator[tuple[int, int]]:
    """The first byte, and the byte behind the last, of each scale of K and V that has a few bytes."""
    for name, tensor in described.items() if isinstance(described, dict) else ():
        offsets = tensor.get("data_offsets") if isinstance(tensor, dict) else None
        match offsets:
            case [int(start), int(stop)] if name.endswith(_KV_SCALES) and 0 <= start < stop:
                if stop <= min(start + _SAMPLE_BYTES, _FARTHEST):
                    yield start, stop


def _demo_model() -> Path:
    path = Path(str(resources.files("baton") / "demo_model"))
    if not (path / "config.json").is_file():
        raise ModelError(f"demo: this installation has no demo model ({path} has no config.json)")
    return path


def looks_like_path(name: str) -> bool:
    """Whether ``name`` can only be a folder's. A hub id is a name or owner/name, without a leading dot, slash
    or tilde."""
    return not name or name[0] in "./~" or name.count("/") > 1 or "\\" in name


def _download(name: str, revision: str | None, weights: bool, fetch: bool, bar: type | None) -> Path:
    # Here, because it takes half a second, which a start from a local directory need not pay.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    at = f"{name}@{revision}" if revision else name
    patterns = [*TEXT_FILES, *(WEIGHT_FILES if weights else ())]
    try:
        found = snapshot_download(
            name,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=[*SKIPPED_FILES],
            local_files_only=not fetch,
            tqdm_class=bar,
        )
    except HFValidationError as error:
        raise ModelError(f"{name}: neither a directory nor a possible hub id") from error
    except GatedRepoError as error:
        raise ModelError(f"{name}: gated on the hub; accept its terms there and set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"{name}: no such directory, and none of that name on the hub") from error
    except RevisionNotFoundError as error:
        raise ModelError(f"{name}: the hub has no revision {revision}") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        where = "not in the cache, and the hub is out of reach" if fetch else "and not in the local cache"
        raise ModelError(f"{at}: no such directory, {where}") from error
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ModelError(f"{at}: the download failed ({reason})") from error
    return Path(found)
