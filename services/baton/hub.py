"""Finding a model's files, and a short name for their contents. No torch: the router uses it too."""

from __future__ import annotations

import hashlib
from importlib import resources
from pathlib import Path

from baton.process.options import ModelError

DEMO = "demo"
TEXT_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
WEIGHT_FILES = ("*.safetensors",)
# Folders hold other formats of the same weights; consolidated*.safetensors are Mistral's own names for them.
SKIPPED_FILES = ("*/*", "consolidated*")

_SAMPLES = 16
_SAMPLE_BYTES = 4096


def is_hub_id(name: str) -> bool:
    """Whether ``name`` means a model of the hub: neither "demo" nor anything of this machine."""
    return name != DEMO and not Path(name).expanduser().exists() and not _looks_like_path(name)


def resolve_model(
    name: str, *, revision: str | None = None, weights: bool = True, bar: type | None = None
) -> Path:
    """The directory that holds the model ``name``: "demo", a local directory, or a hub id (fetched).

    ``revision`` (branch, tag or commit) and ``weights`` (False: config and tokenizer only) apply to hub ids.
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
    if _looks_like_path(name):
        raise ModelError(f"{name}: no such directory")
    return _download(name, revision, weights, bar)


def revision_of(path: Path) -> str:
    """16 hex digits that name the contents of a model directory.

    Two workers may exchange KV only if these agree. Hashed are config.json and, of each safetensors file,
    its name, size and header (which names every tensor) and samples spread over the data, so that two
    fine-tunes of one model differ; reading whole files would take minutes.
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
            prefix = stream.read(8)
            digest.update(prefix)
            header = min(int.from_bytes(prefix, "little"), size)
            digest.update(stream.read(header))
            for sample in range(_SAMPLES):
                stream.seek(8 + header + max(0, size - 8 - header) * sample // _SAMPLES)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def _demo_model() -> Path:
    path = Path(str(resources.files("baton") / "demo_model"))
    if not (path / "config.json").is_file():
        raise ModelError(f"demo: this installation has no demo model ({path} has no config.json)")
    return path


def _looks_like_path(name: str) -> bool:
    """A hub id is a name or owner/name, without a leading dot, slash or tilde."""
    return not name or name[0] in "./~" or name.count("/") > 1 or "\\" in name


def _download(name: str, revision: str | None, weights: bool, bar: type | None) -> Path:
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
        raise ModelError(f"{at}: no such directory, not in the cache, and the hub is out of reach") from error
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ModelError(f"{at}: the download failed ({reason})") from error
    return Path(found)
