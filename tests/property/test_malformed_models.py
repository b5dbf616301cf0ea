"""Whatever a model's directory holds, reading it ends with a model or with a ModelError of one line."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton import hub
from baton.models.config import ModelConfig
from baton.models.inspection import inspect_checkpoint
from baton.process.options import ModelError
from tests.support.published_configs import PUBLISHED
from tests.support.tiny_latents import LATENTS
from tests.support.tiny_mambas import MAMBAS
from tests.support.tiny_models import TINY_MODELS

FULL = os.environ.get("BATON_MALFORMED") == "full"
"""Whether every field of every family gets every value, and files are damaged in many more places."""
DAMAGES = 300 if FULL else 12
"""Damaged copies of each file."""
WHOLE = (None, True, -1, 0, 1, 3, 2**31 - 1, 2**31, 2**64, 10**400)
BROKEN = (-0.5, 0.5, 1e-320, 1e308, float("inf"), float("nan"))
TEXTS = ("", "x", "\ud800", "1")
LISTS: tuple[list[object], ...] = ([], [None], [["x"]], [{}], [1] * 3, [2**70, 1.5], ["full_attention"] * 3)
OBJECTS: tuple[dict[str, object], ...] = (
    {},
    {"a": {}},
    {"rope_type": "yarn", "factor": 1e308, "rope_theta": 1},
    {"rope_type": "longrope", "short_factor": [1e308], "long_factor": [float("inf")]},
    {"rope_type": "dynamic", "factor": 1e30},
    {"rope_type": "llama3", "factor": 1, "low_freq_factor": 1, "high_freq_factor": 1},
    {"quant_method": "fp8", "weight_block_size": [0, -1]},
    {"quant_method": "gptq", "bits": 0, "group_size": 2**40},
    {"quant_method": "compressed-tensors", "config_groups": {"g": []}},
)
VALUES: tuple[object, ...] = (*WHOLE, *BROKEN, *TEXTS, *LISTS, *OBJECTS)
MORE_FIELDS: tuple[str, ...] = (
    *("architectures", "rope_scaling", "rope_parameters", "partial_rotary_factor", "dtype"),
    *("layer_types", "quantization_config", "eos_token_id", "tie_word_embeddings", "auto_map"),
)
DIRECTORIES: dict[str, Callable[[Path], Path]] = {
    "sharded": TINY_MODELS["llama-sharded"],
    "latents": LATENTS["deepseek-v3"],
    "states": MAMBAS["lfm2"],
}


def places_in(value: object, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Where each part of a JSON value is, but for all parts of a list behind its first."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield (*at, name)
            yield from places_in(part, (*at, name))
    elif isinstance(value, list) and value:
        yield (*at, 0)
        yield from places_in(value[0], (*at, 0))


def with_value(value: object, at: tuple[str | int, ...], new: object) -> object:
    """A copy of a JSON value that has ``new`` at one place."""
    if not at:
        return new
    key, *rest = at
    if isinstance(value, list):
        return [
            with_value(part, tuple(rest), new) if place == key else part for place, part in enumerate(value)
        ]
    assert isinstance(value, dict)
    return {**value, key: with_value(value.get(key), tuple(rest), new)}


def changed(config: object, rng: random.Random, count: int) -> Iterator[object]:
    """The config with one value changed, in all ways or in ``count`` that are drawn."""
    places = [*places_in(config), *((name,) for name in MORE_FIELDS)]
    whole = [(at, value) for at in places for value in VALUES]
    for at, value in whole if FULL else rng.sample(whole, min(count, len(whole))):
        yield with_value(config, at, value)


def is_refused(path: Path) -> bool:
    """Read all that there is of a model but its weights. Whether it is refused, in a line that names a file
    of the directory."""
    try:
        hub.revision_of(path)
        hub.kv_scales_digest(path)
        return bool(inspect_checkpoint(path).problems)
    except ModelError as error:
        assert str(path) in str(error)
        assert "\n" not in str(error)
        return True


@pytest.mark.parametrize("name", PUBLISHED)
def test_changed_configs(name: str) -> None:
    published = json.loads(json.dumps(PUBLISHED[name]))
    rng, refused = random.Random(name), 0
    for config in changed(published, rng, 60):
        try:
            ModelConfig.from_dict(config, where="config.json").kept()  # type: ignore[arg-type]
        except ModelError as error:
            assert str(error).startswith("config.json: ")
            assert "\n" not in str(error)
            refused += 1
    assert refused


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: recipe(root / name) for name, recipe in DIRECTORIES.items()}


@pytest.mark.parametrize("name", DIRECTORIES)
def test_configs_that_are_not_those_of_the_weights(
    name: str, directories: dict[str, Path], tmp_path: Path
) -> None:
    path = shutil.copytree(directories[name], tmp_path / name)
    file = path / "config.json"
    assert not is_refused(path)
    refused = 0
    for config in changed(json.loads(file.read_text()), random.Random(name), 60):
        file.write_text(json.dumps(config))
        refused += is_refused(path)
    assert refused


def damaged(whole: bytes, rng: random.Random) -> bytes:
    """A copy of a file with something wrong in its first kilobytes, where headers are."""
    data, at = bytearray(whole), rng.randrange(min(len(whole), 2000))
    match rng.randrange(6):
        case 0:
            data[at] ^= 1 << rng.randrange(8)
        case 1:
            del data[at:]
        case 2:
            data[at:at] = rng.randbytes(8)
        case 3:
            data[rng.randrange(8)] = rng.randrange(256)
        case 4:
            digits = [place for place in range(min(len(data), 2000)) if chr(data[place]).isdigit()]
            data[rng.choice(digits)] = ord(rng.choice("0123456789.-e"))
        case 5:
            data[at:at] = rng.choice([b"[", b"{", b'{"a":']) * 100_000
    return bytes(data)


@pytest.mark.parametrize("name", DIRECTORIES)
def test_damaged_files(name: str, directories: dict[str, Path], tmp_path: Path) -> None:
    path = shutil.copytree(directories[name], tmp_path / name)
    rng, refused = random.Random(name), 0
    for file in sorted(path.iterdir()):
        if file.suffix not in (".json", ".safetensors") or file.name.startswith("tokenizer"):
            continue
        whole = file.read_bytes()
        for _ in range(DAMAGES):
            file.write_bytes(damaged(whole, rng))
            refused += is_refused(path)
        file.write_bytes(whole)
    assert refused > DAMAGES
    assert not is_refused(path)
