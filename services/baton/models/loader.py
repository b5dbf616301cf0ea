"""Models from Hugging Face directories: config.json and safetensors, copied into fused parameters."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal, get_args

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from baton.errors import ModelError
from baton.models.base import CausalLM, Place
from baton.models.config import DTYPES, ModelConfig
from baton.models.quantization import Quantization
from baton.models.registry import MODEL_CLASSES
from baton.parallel.collectives import Parallel
from baton.parallel.shard import Shard
from baton.telemetry.startup import StartClock
from baton_kernels.attention import new_pool
from baton_kernels.cpu.linear import kernels_for
from baton_kernels.int8 import quantize

LoadFormat = Literal["auto", "dummy"]
Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) while weights are read; the last call has both equal."""

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def load_model(
    path: Path,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    load_format: LoadFormat = "auto",
    seed: int = 0,
    progress: Progress | None = None,
    parallel: Parallel | None = None,
    clock: StartClock | None = None,
    quantization: Quantization = "none",
) -> CausalLM:
    """The model in the directory ``path``, ready to run on ``device``; the part that ``parallel`` says, or
    all of it.

    ``dtype``: "auto" (as saved), "float32", "bfloat16" or "float16". ``load_format`` "dummy" reads only the
    config and draws the weights from ``seed``: the same ones wherever the kind of device and the dtype are,
    however the model is split. ``quantization`` int8 rounds the weights of matmuls as they come, each row
    with the scale of the whole row, so they too are the same however the model is split.

    Raises ModelError for anything about the directory that keeps the model from being served.
    """
    clock = clock or StartClock()
    with clock.phase("config"):
        config = ModelConfig.from_dir(path)
    if load_format not in get_args(LoadFormat):
        raise ModelError(f"load format is {load_format!r}; allowed: {', '.join(get_args(LoadFormat))}")
    if quantization == "int8":
        _check_int8(torch.device(device), torch_dtype(dtype, config))
    weights = weight_files(path) if load_format == "auto" else []
    family, alone = MODEL_CLASSES[config.architecture], Parallel.alone(config)
    with clock.phase("weights"):
        with torch.device(device):
            model = family(config, torch_dtype(dtype, config), parallel or alone)
            if quantization == "int8":
                model.quantize()
        whole = model
        if model.shard.world > 1:
            # Not otherwise: torch's first tensor without memory imports sympy, which takes as long as torch.
            with torch.device("meta"):
                whole = family(config, torch_dtype(dtype, config), alone)
        shapes = {name: place.tensor.shape for name, place in whole.checkpoint_tensors().items()}
        if load_format == "dummy":
            _draw_weights(model, shapes, seed)
        else:
            fill(
                model.checkpoint_tensors(),
                shapes,
                path,
                weights,
                owner=config.architecture,
                harmless=lambda name: _harmless(name, config),
                progress=progress or (lambda done, total: None),
            )
    with clock.phase("pack"):
        model.pack()
    return model.eval()


def _check_int8(device: torch.device, dtype: torch.dtype) -> None:
    """ModelError if nothing could multiply int8 weights."""
    if kernels_for(device, dtype) is not None:
        return
    if device.type != "cpu":
        where = f"on {device.type}"
    elif kernels_for(device, torch.float32) is None:
        where = "without the CPU's kernels (BATON_CPU_KERNELS=native says why there are none)"
    else:
        where = f"with dtype {str(dtype).removeprefix('torch.')}"
    raise ModelError(f"quantization (--quantization) is int8; allowed {where}: none")


def torch_dtype(name: str, config: ModelConfig) -> torch.dtype:
    """The torch type that ``name`` ("auto": the one the weights were saved in) stands for."""
    name = config.dtype if name == "auto" else name
    if name not in DTYPES:
        raise ModelError(f"dtype is {name!r}; allowed: auto, {', '.join(DTYPES)}")
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def new_kv_pool(
    config: ModelConfig,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: str | torch.device,
    shard: Shard | None = None,
) -> Tensor:
    """A zeroed KV pool for the model: [num_blocks, kv_heads, layers, 2, block_size, head_dim]. ``shard``:
    with its heads and layers alone."""
    heads, layers = _heads_and_layers(config, shard)
    dim = config.head_dim
    return new_pool(num_blocks, heads, layers, block_size, dim, dtype=dtype, device=torch.device(device))


def kv_block_bytes(
    config: ModelConfig, block_size: int, dtype: torch.dtype, shard: Shard | None = None
) -> int:
    """Bytes of one block of the pool: all heads and layers, or those of ``shard``."""
    heads, layers = _heads_and_layers(config, shard)
    return heads * layers * 2 * block_size * config.head_dim * dtype.itemsize


def _heads_and_layers(config: ModelConfig, shard: Shard | None) -> tuple[int, int]:
    if shard is None:
        return config.num_kv_heads, config.num_layers
    return len(shard.kv_heads), len(shard.layers)


def weight_files(path: Path) -> list[Path]:
    """The files of safetensors in the directory. ModelError if there are none, or not all that are listed."""
    if (path / SINGLE_FILE).is_file():
        return [path / SINGLE_FILE]
    index = path / INDEX_FILE
    if not index.is_file():
        pickled = next((file.name for pattern in PICKLES for file in sorted(path.glob(pattern))), None)
        if pickled:
            raise ModelError(f"{path}: weights are pickled ({pickled}); only safetensors are loaded")
        raise ModelError(f"{path}: no weights: neither {SINGLE_FILE} nor {INDEX_FILE}")
    try:
        names = sorted({str(name) for name in json.loads(index.read_text())["weight_map"].values()})
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{index}: cannot be read as an index of weights ({error!r})") from error
    for name in names:
        if Path(name).name != name:
            raise ModelError(f"{index}: shard {name} lies outside the directory")
        if not (path / name).is_file():
            raise ModelError(f"{path}: shard {name} is missing ({INDEX_FILE} lists it)")
    return [path / name for name in names]


def fill(
    places: Mapping[str, Place],
    shapes: Mapping[str, torch.Size],
    path: Path,
    files: list[Path],
    *,
    owner: str,
    harmless: Callable[[str], bool] = lambda name: False,
    progress: Progress = lambda done, total: None,
) -> None:
    """Copy what ``places`` want of the files in the directory ``path``, each place exactly once, and nothing
    else is read. ``shapes`` are those of all tensors that may be there.

    ``owner`` is what the places belong to, for the ModelError about a tensor without one, unless that is
    ``harmless``.
    """
    waiting = dict(places)
    done, total = 0, sum(file.stat().st_size for file in files)
    for file in files:
        for name, tensor in _tensors(file):
            done += tensor.nbytes
            if name in waiting:
                _copy(file, name, tensor, waiting.pop(name), shapes[name])
            elif name in places:
                raise ModelError(f"{file}: tensor {name} comes a second time")
            elif name in shapes:  # another rank's
                pass
            elif not harmless(name):
                raise ModelError(f"{file}: {owner} has no place for tensor {name}")
            progress(done, total)
    if waiting:
        first, more = min(waiting), len(waiting) - 1
        raise ModelError(f"{path}: tensor {first} is missing" + (f", and {more} more" if more else ""))
    progress(total, total)


def _tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Tensors of one file, mapped, not read: their pages come in as they are copied."""
    try:
        with safe_open(file, framework="pt", device="cpu") as reader:
            for name in reader.keys():  # noqa: SIM118 (not a mapping)
                yield name, reader.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file}: truncated or corrupt ({error})") from error


def fill_all(module: nn.Module, path: Path, *, owner: str) -> None:
    """Fill a module whose names are those of the tensors in the directory ``path``."""
    tensors = module.state_dict()
    places = {name: Place(tensor, (slice(None),) * tensor.dim()) for name, tensor in tensors.items()}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    fill(places, shapes, path, weight_files(path), owner=owner)


def _copy(file: Path, name: str, tensor: Tensor, place: Place, shape: torch.Size) -> None:
    if tensor.shape != shape:
        found, expected = list(tensor.shape), list(shape)
        raise ModelError(f"{file}: tensor {name} has shape {found}; expected {expected}")
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        found_type = str(tensor.dtype).removeprefix("torch.")
        raise ModelError(f"{file}: tensor {name} is {found_type}; allowed: {', '.join(DTYPES)}")
    _put(tensor, place)


def _put(tensor: Tensor, place: Place) -> None:
    """Copy what the place wants of a tensor of the checkpoint."""
    if place.scales is None:
        place.tensor.copy_(tensor[place.source])
        return
    # The whole of these rows, of which the place may hold some columns: their scales are those of one rank.
    rows, columns = place.source
    values, scales = quantize(tensor[rows])
    place.tensor.copy_(values[:, columns])
    place.scales.copy_(scales)


def _harmless(name: str, config: ModelConfig) -> bool:
    """Tensors that old checkpoints carry though they follow from the config or from other tensors."""
    return name.endswith(".rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings)


def _draw_weights(model: CausalLM, shapes: Mapping[str, torch.Size], seed: int) -> None:
    """Norms at 1, biases at 0, matrices scaled so that activations neither fade nor blow up. A rank draws
    each matrix whole, of those that it has a part of."""
    places = model.checkpoint_tensors()
    seeds = itertools.count(seed)
    for name, shape in shapes.items():
        matrix_seed = next(seeds) if len(shape) > 1 else 0
        if name not in places:
            continue
        place = places[name]
        tensor = place.tensor
        if name.endswith(".bias"):
            tensor.zero_()
        elif tensor.dim() == 1:
            tensor.fill_(1)
        else:
            generator = torch.Generator(tensor.device).manual_seed(matrix_seed)
            in_place = tensor.shape == shape and place.scales is None
            drawn = tensor if in_place else tensor.new_empty(shape, dtype=model.dtype)
            drawn.normal_(std=shape[1] ** -0.5, generator=generator)
            if not in_place:
                _put(drawn, place)
