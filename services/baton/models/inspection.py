"""What a checkpoint is, and how much memory its weights take, by its config and the headers of its files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from baton.models.config import ModelConfig
from baton.models.decoder import Decoder
from baton.models.expected_tensors import ExpectedTensors, TensorPlaces
from baton.models.loader import as_saved, places_of, scheme_of, torch_dtype, weight_files
from baton.models.quantization.plain import PLAIN
from baton.models.quantization.registry import Quantization
from baton.models.unfilled import check_sizes, unfilled
from baton.models.weight_file import WeightFile
from baton.parallel.collectives import Alone, Parallel
from baton.parallel.shard import Shard
from baton.process.options import ModelError


@dataclass(frozen=True, slots=True)
class RankWeights:
    """A rank's part of a model."""

    shard: Shard
    num_bytes: int
    """The bytes of its weights as they are loaded."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """A checkpoint that was not loaded."""

    config: ModelConfig
    dtype: torch.dtype
    """The type of activations, and of plain weights."""
    scheme: str
    """The scheme's description; "": all weights are plain."""
    matrices: Mapping[str, int]
    """The number of the matrices that are kept in each way but plain."""
    plain: tuple[str, ...]
    """The names of the modules of plain matrices, with * for each number."""
    num_parameters: int
    """Numbers of the model, however they are kept."""
    num_files: int
    file_bytes: int
    ranks: tuple[RankWeights, ...]
    problems: tuple[str, ...]
    """What the loader would say of the files, a line for each tensor that it refuses."""


def inspect_checkpoint(
    path: Path,
    dtype: str = "auto",
    quantization: Quantization = "auto",
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
) -> Inspection:
    """The checkpoint in the directory ``path``, of whose tensors none is read; but an output head that the
    config calls tied is compared with the embedding. The arguments are those of ``load_model``.

    ModelError for anything but single tensors that keeps the model from being served, ValueError for a split
    that it does not allow."""
    config = ModelConfig.from_dir(path)
    files = weight_files(path)
    config = as_saved(config, files)
    scheme, number = scheme_of(config, quantization), torch_dtype(dtype, config)
    world = tensor_parallel_size * pipeline_parallel_size
    shards = [Shard.of(config, rank, tensor_parallel_size, pipeline_parallel_size) for rank in range(world)]
    check_sizes(config, path, files)
    whole = unfilled(config, path, number, Parallel.alone(config), scheme)
    places = places_of(whole, whole)
    matrices, plain = _kept(places)
    numbers = unfilled(config, path, number, Parallel.alone(config), PLAIN).parameters()
    parts = (
        [whole]
        if world == 1
        else [unfilled(config, path, number, Parallel(shard, Alone()), scheme) for shard in shards]
    )
    return Inspection(
        config=config,
        dtype=number,
        scheme=scheme.description,
        matrices=matrices,
        plain=plain,
        num_parameters=sum(each.numel() for each in numbers),
        num_files=len(files),
        file_bytes=sum(file.num_bytes for file in files),
        ranks=tuple(RankWeights(part.shard, weight_bytes(part)) for part in parts),
        problems=tuple(_problems(places, path, files)),
    )


def weight_bytes(model: Decoder) -> int:
    """The bytes of a model's weights, with those of an output head that is made of the embedding and kept in
    another way."""
    held = {id(each): each.nbytes for each in model.parameters()}
    head = model.tied_head()
    if head is not None:
        held |= {id(each): each.nbytes for each in head.parameters.values()}
    return sum(held.values())


def _kept(places: TensorPlaces) -> tuple[Mapping[str, int], tuple[str, ...]]:
    """The number of matrices that are kept in each way, and the modules of those that are plain."""
    matrices, plain = Counter[str](), set[str]()
    for name, place in places.of_rank.items():
        if place.spec is not None:
            matrices[str(place.spec)] += place.num_matrices
        elif len(place.shape) > 1:
            plain.add(re.sub(r"\d+", "*", name.rpartition(".")[0]))
    return +matrices, tuple(sorted(plain))


def _problems(places: TensorPlaces, path: Path, files: list[WeightFile]) -> list[str]:
    """What the loader would say of each tensor that it refuses."""
    found: list[str] = []
    expected = ExpectedTensors(places, path)
    for file in files:
        for name, header in file.tensors.items():
            try:
                expected.place_of(file, name, header)
            except ModelError as error:
                found.append(str(error))
    try:
        expected.check_all_came()
    except ModelError as error:
        found.append(str(error))
    return found
