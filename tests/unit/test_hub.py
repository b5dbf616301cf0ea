"""Names of models to directories, and directories to revisions."""

from __future__ import annotations

import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors.torch import save_file

from baton import hub
from baton.process.options import ModelError
from tests.support.tiny_models import TINY_MODELS


def test_local_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub.resolve_model(str(tmp_path)) == tmp_path
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub.resolve_model("org/model") == Path("org/model")


@pytest.mark.parametrize("name", ["/no/where", "./nowhere", "../nowhere", "~/nowhere", "a/b/c", "a\\b", ""])
def test_names_that_look_like_paths(name: str) -> None:
    with pytest.raises(ModelError, match="no such directory"):
        hub.resolve_model(name + "-not-there" if name else "/no/where")


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelError, match="is a file; a model is a directory"):
        hub.resolve_model(str(tmp_path / "model.gguf"))


def test_demo_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.resources.files", lambda package: tmp_path)
    with pytest.raises(ModelError, match="no demo model"):
        hub.resolve_model("demo")
    (tmp_path / "demo_model").mkdir()
    (tmp_path / "demo_model" / "config.json").touch()
    assert hub.resolve_model("demo") == tmp_path / "demo_model"


@pytest.mark.parametrize("weights", [True, False])
def test_hub_id(weights: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def download(name: str, **options: object) -> str:
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert hub.resolve_model("org/model", revision="v2", weights=weights) == tmp_path
    assert (asked["name"], asked["revision"]) == ("org/model", "v2")
    patterns = asked["allow_patterns"]
    assert isinstance(patterns, list)
    assert ("*.safetensors" in patterns) == weights
    assert "*.json" in patterns
    assert not any("bin" in pattern or "py" in pattern for pattern in patterns)


def test_what_the_cache_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, *, local_files_only: bool, **options: object) -> str:
        if not local_files_only:
            return str(tmp_path)
        raise hub_error(LocalEntryNotFoundError)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert hub.resolve_model("org/model") == tmp_path
    with pytest.raises(ModelError, match="org/model: no such directory, and not in the local cache"):
        hub.resolve_model("org/model", fetch=False)


def hub_error(kind: type[Exception]) -> Exception:
    """An error as the hub's client raises it, without the HTTP response that its constructor may ask for."""
    error = kind.__new__(kind)
    error.args = ("refused\nin two lines",)
    return error


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (GatedRepoError, "org/model: gated on the hub; accept its terms there and set HF_TOKEN"),
        (RepositoryNotFoundError, "org/model: no such directory, and none of that name on the hub"),
        (RevisionNotFoundError, "org/model: the hub has no revision v9"),
        (
            LocalEntryNotFoundError,
            "org/model@v9: no such directory, not in the cache, and the hub is out of reach",
        ),
        (HFValidationError, "org/model: neither a directory nor a possible hub id"),
        (OSError, "org/model@v9: the download failed (refused)"),
    ],
)
def test_hub_failures(kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, **options: object) -> str:
        raise hub_error(kind)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ModelError) as failure:
        hub.resolve_model("org/model", revision="v9")
    assert str(failure.value) == message


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TINY_MODELS["llama-sharded"](tmp_path_factory.mktemp("hub") / "model")


def test_revision_is_that_of_the_contents(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    assert hub.revision_of(copy) == hub.revision_of(model)
    assert len(hub.revision_of(copy)) == 16
    (copy / "README.md").touch()
    assert hub.revision_of(copy) == hub.revision_of(model)


@pytest.mark.parametrize("change", ["config", "weights", "size", "name", "fewer"])
def test_revision_changes_with_the_contents(change: str, model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    shard = sorted(copy.glob("*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    match change:
        case "config":
            (copy / "config.json").write_text((copy / "config.json").read_text() + " ")
        case "weights":
            data[8 + int.from_bytes(data[:8], "little")] ^= 1  # the first of the samples
            shard.write_bytes(data)
        case "size":
            shard.write_bytes(data[:-1])
        case "name":
            shard.rename(copy / "other.safetensors")
        case "fewer":
            shard.unlink()
    assert hub.revision_of(copy) != hub.revision_of(model)


def test_revision_changes_with_any_scale_of_k_and_v(tmp_path: Path) -> None:
    """Between which no sample falls: calibrated again, a checkpoint differs in nothing else."""
    (tmp_path / "config.json").touch()
    names = [f"model.layers.{layer}.self_attn.{kind}_scale" for layer in range(3) for kind in "kv"]
    tensors = {name: torch.tensor(1.0) for name in names}
    tensors |= {"a": torch.zeros(1 << 16), "z": torch.zeros(1 << 15)}
    file, found = tmp_path / "model.safetensors", set[str]()
    for changed in ["nothing", *names]:
        save_file(tensors | ({changed: torch.tensor(2.0)} if changed in names else {}), file)
        found.add(hub.revision_of(tmp_path))
    assert len(found) == 1 + len(names)


def test_the_scales_of_k_and_v_alone(tmp_path: Path) -> None:
    def told(**tensors: float) -> str:
        save_file(
            {name: torch.tensor(number) for name, number in tensors.items()}, tmp_path / "model.safetensors"
        )
        return hub.kv_scales_digest(tmp_path)

    assert told(weight=1.0) == ""
    assert told(weight=1.0, k_scale=2.0) == told(weight=3.0, k_scale=2.0) != ""
    assert told(weight=1.0, k_scale=2.0) != told(weight=1.0, k_scale=4.0)


def test_revision_of_odd_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        hub.revision_of(tmp_path)
    (tmp_path / "config.json").touch()
    for size in (0, 3, 8, 100):
        (tmp_path / "model.safetensors").write_bytes(b"\xff" * size)
        for digest in (hub.revision_of, hub.kv_scales_digest):
            with pytest.raises(
                ModelError, match=r"model\.safetensors: truncated or corrupt \(the header has"
            ):
                digest(tmp_path)
    for header in (
        b'{"k_scale": 1}',
        b'["k_scale"]',
        b'{"k_scale": {"data_offsets": ["a", 4]}}',
        b'{"k_scale": {"data_offsets": [0.5, 4.5]}}',
        b'{"k_scale": {"data_offsets": [1180591620717411303424, 1180591620717411303428]}}',
        b'{"k_scale": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"{k_scale",
    ):
        (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        hub.revision_of(tmp_path)


@pytest.mark.parametrize("length", [2**60, 200_000_000], ids=["beyond the file", "beyond the format"])
@pytest.mark.parametrize("digest", [hub.revision_of, hub.kv_scales_digest])
def test_a_corrupt_header_is_not_read(digest: Callable[[Path], str], length: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    with (tmp_path / "model.safetensors").open("wb") as stream:
        stream.write(length.to_bytes(8, "little"))
        stream.truncate(1 << 30)  # without blocks of its own
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=rf"truncated or corrupt \(the header has {length} bytes"):
            digest(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
