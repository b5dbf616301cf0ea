"""A checkpoint compared with the model that its config describes, before any memory is allocated for that."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from baton.models.config import ExpertsConfig, ModelConfig
from baton.models.decoder import Decoder
from baton.models.expected_tensors import ExpectedTensors, TensorPlaces
from baton.models.quantization.base import QuantizationScheme
from baton.models.weight_file import WeightFile
from baton.parallel.collectives import Parallel
from baton.process.options import ModelError

_LAYER = re.compile(r"\blayers\.(\d+)\.")
_NUMBERS_OF_A_BYTE = 8
"""The most numbers of a weight that a byte of a file stands for."""


def check_sizes(config: ModelConfig, path: Path, files: Sequence[WeightFile]) -> None:
    """Check that the files can hold so many layers, experts and rows, without building the model: as many
    modules, and as long lists, would be built. ModelError if they cannot."""
    names = [name for file in files for name in file.tensors]
    layers = max((int(found[1]) + 1 for name in names if (found := _LAYER.search(name))), default=0)
    where = path / "config.json"
    if layers < config.num_layers:
        raise ModelError(
            f"{where}: num_hidden_layers is {config.num_layers}; allowed: at most {layers}, as in the weights"
        )
    experts = _experts(config)
    if experts is not None and experts.names.form == "separate":
        count, there = experts.num_experts, _num_experts(experts, names)
        if there < count:
            raise ModelError(
                f"{where}: the number of experts is {count}; allowed: at most {there}, as in the weights"
            )
    most = _NUMBERS_OF_A_BYTE * sum(file.num_bytes for file in files)
    for names_of_sizes, rows, columns in _matrices(config):
        if rows * columns > most:
            raise ModelError(
                f"{where}: {names_of_sizes} make a matrix of {rows} x {columns}; allowed: at most {most} "
                f"numbers, as the weights have {most // _NUMBERS_OF_A_BYTE} bytes"
            )


def _matrices(config: ModelConfig) -> Iterator[tuple[str, int, int]]:
    """The fields that the sizes of some matrix of the model follow from, and its rows and columns."""
    hidden, heads = config.hidden_size, config.num_heads
    kinds = {kind for layer in range(config.num_layers) for kind in config.mixers_of(layer)}
    yield "vocab_size and hidden_size", config.vocab_size, hidden
    if "attention" in kinds:
        yield "num_attention_heads, head_dim and hidden_size", heads * config.head_dim, hidden
    if (experts := _experts(config)) is not None:
        rows = experts.num_experts * experts.inner
        yield "the number of experts, their size and hidden_size", rows, hidden
    if (latent := config.latent) is not None:
        yield "kv_lora_rank and hidden_size", latent.width, hidden
        yield "the sizes of query heads and q_lora_rank", heads * latent.query_dim, latent.q_rank or hidden
        yield "the sizes of value heads and kv_lora_rank", heads * latent.value_dim, latent.kv_rank
    if (delta := config.delta) is not None:
        yield "the sizes of key heads and hidden_size", delta.key_heads * delta.key_dim, hidden
        yield "the sizes of value heads and hidden_size", delta.value_heads * delta.value_dim, hidden
    if (mamba := config.mamba) is not None:
        yield "the sizes of Mamba heads and hidden_size", mamba.heads * mamba.head_dim, hidden
        yield "the groups of Mamba heads and hidden_size", mamba.groups * mamba.state_dim, hidden


def _experts(config: ModelConfig) -> ExpertsConfig | None:
    """The experts of some layer; None if no layer has any, whatever the config says of them."""
    return config.experts if any(map(config.has_experts, range(config.num_layers))) else None


def _num_experts(experts: ExpertsConfig, names: Sequence[str]) -> int:
    """The experts that tensors of their own are named for."""
    before, behind = experts.names.down.split("{}")
    pattern = re.compile(rf"\b{re.escape(before)}(\d+){re.escape(behind)}(?:[._]|$)")
    return max((int(found[1]) + 1 for name in names if (found := pattern.search(name))), default=0)


def unfilled(
    config: ModelConfig, path: Path, dtype: torch.dtype, parallel: Parallel, scheme: QuantizationScheme
) -> Decoder:
    """The model of the directory ``path``, or a rank's part of it, without memory. ModelError if the config
    describes none that can be."""
    with described_by(path), torch.device("meta"):
        return Decoder(config, dtype, parallel, scheme)


@contextmanager
def described_by(path: Path) -> Iterator[None]:
    """Turn what a model's modules raise of sizes that no model has into a ModelError."""
    try:
        yield
    except (ModelError, torch.OutOfMemoryError):
        raise
    except (
        ArithmeticError,
        AssertionError,
        LookupError,
        MemoryError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        told = str(error).strip().partition("\n")[0]
        raise ModelError(
            f"{path / 'config.json'}: describes no model that can be built ({type(error).__name__}: {told})"
        ) from error


def check_tensors(places: TensorPlaces, path: Path, files: Sequence[WeightFile]) -> None:
    """Check that each tensor in the files has a place of its shape and type, and each place a tensor.
    ModelError for the first that does not fit."""
    expected = ExpectedTensors(places, path)
    for file in files:
        for name, header in file.tensors.items():
            expected.place_of(file, name, header)
    expected.check_all_came()
