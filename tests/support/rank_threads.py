"""The ranks of a split model as threads of the test, over real groups of gloo."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from baton.models.base import CausalLM
from baton.models.config import LoadFormat, ModelConfig
from baton.models.loader import load_model
from baton.models.quantization.registry import Quantization
from baton.parallel.collectives import GroupCollectives, Parallel
from baton.parallel.shard import Shard

Result = TypeVar("Result")


def in_ranks(
    path: Path,
    tp_size: int,
    pp_size: int,
    work: Callable[[CausalLM], Result],
    load_format: LoadFormat = "auto",
    dtype: str = "float32",
    quantization: Quantization = "none",
) -> list[Result]:
    """What ``work`` returns on each rank, the leader's first; it is given the rank's model."""
    sizes, store = ModelConfig.from_dir(path), HashStore()
    # A rank that is done first would close its connections, and others are still connecting: gloo takes that
    # for a death, or waits for ever.
    until_all_are_done: list[GroupCollectives] = []

    def run(rank: int) -> Result:
        shard = Shard.of(sizes, rank, tp_size, pp_size)
        collectives = GroupCollectives(shard, torch.device("cpu"))
        parallel = Parallel(shard, collectives)
        model = load_model(path, dtype, load_format=load_format, parallel=parallel, quantization=quantization)
        until_all_are_done.append(collectives)
        collectives.connect(store)
        return work(model)

    world = tp_size * pp_size
    with ThreadPoolExecutor(world) as threads:
        return list(threads.map(run, range(world)))
