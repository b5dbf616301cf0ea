"""Models from Hugging Face directories: config.json and safetensors, copied into fused parameters."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import get_args

import torch
from torch import Tensor, nn

from baton.models.attention import Attention
from baton.models.base import CausalLM
from baton.models.config import DTYPES, KVCacheDtype, LoadFormat, ModelConfig
from baton.models.decoder import Decoder, checkpoint_name
from baton.models.expected_tensors import ExpectedTensors, TensorPlaces
from baton.models.json_fields import read_object
from baton.models.quantization.base import Place, QuantizationScheme
from baton.models.quantization.checkpoint import CheckpointScheme
from baton.models.quantization.experts_format import SEPARATE
from baton.models.quantization.registry import SCHEMES, Quantization
from baton.models.unfilled import check_sizes, check_tensors, described_by, unfilled
from baton.models.weight_file import WeightFile, dtype_name
from baton.parallel.collectives import Parallel
from baton.parallel.shard import Shard
from baton.process.options import ModelError
from baton.process.start_clock import StartClock
from baton_kernels.attention import new_pool
from baton_kernels.cpu.attention import CpuPlan
from baton_kernels.cpu.library import advise_large_pages, give_back_free_memory, native
from baton_kernels.kv_fp8 import FP8, KVScales
from baton_kernels.kv_layout import KVLayout, KVLayoutError, TokenKV
from baton_kernels.kv_scaled import SCALE_BYTES

Progress = Callable[[int, int], None]
"""A function called with (bytes done, bytes in all) while weights are read; the last call has both equal."""

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
WRAPPED = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("backbone.", "model."),
)
"""Beginnings of names in checkpoints that have an encoder, too, or call the model a backbone, and what they
are elsewhere."""
MOST_NAME_BYTES = 255
"""The length of the longest name that a file system has for a file."""
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
    quantization: Quantization = "auto",
) -> CausalLM:
    """The model in the directory ``path``, ready to run on ``device``; the part that ``parallel`` names, or
    all of it.

    ``dtype``: "auto" (as saved), "float32", "bfloat16" or "float16". ``load_format`` "dummy" reads only the
    config and draws the weights from ``seed``: the same weights for the same kind of device and dtype,
    however the model is split. ``quantization``: the scheme that keeps the weights of matmuls, auto: as the
    checkpoint has them; with any, they are the same however the model is split.

    Raises ModelError for anything about the directory that keeps the model from being served.
    """
    clock = clock or StartClock()
    with clock.phase("config"):
        config = ModelConfig.from_dir(path)
    if load_format not in get_args(LoadFormat):
        raise ModelError(f"load format is {load_format!r}; allowed: {', '.join(get_args(LoadFormat))}")
    weights = weight_files(path) if load_format == "auto" else []
    config = as_saved(config, weights)
    scheme = scheme_of(config, quantization)
    number, alone = torch_dtype(dtype, config), Parallel.alone(config)
    scheme.check(torch.device(device), number)
    with clock.phase("weights"):
        if load_format == "auto":
            check_sizes(config, path, weights)
        whole = unfilled(config, path, number, alone, scheme)
        if parallel is not None:  # what cannot be split is told before what the files lack
            unfilled(config, path, number, parallel, scheme)
        if load_format == "auto":
            check_tensors(places_of(whole, whole), path, weights)
        with described_by(path), torch.device(device):
            model: CausalLM = Decoder(config, number, parallel or alone, scheme)
        if load_format == "dummy":
            _draw_weights(model, places_of(model, whole).shapes, seed)
        else:
            fill(places_of(model, whole), path, weights, progress or (lambda done, total: None))
    give_back_free_memory()
    with clock.phase("pack"):
        model.pack()
    give_back_free_memory()
    return model.eval()


def scheme_of(config: ModelConfig, name: Quantization) -> QuantizationScheme:
    """The scheme that ``name`` stands for. ModelError if the checkpoint is quantized in another one."""
    if config.quantization is None:
        plain: QuantizationScheme = resolve_name(SCHEMES["none" if name == "auto" else name])
        return plain
    if name != "auto":
        raise ModelError(
            f"quantization (--quantization) is {name}; allowed for a checkpoint that is quantized "
            f"({config.quantization.method}): auto"
        )

    def names_of(module: str) -> tuple[str, ...]:
        named = checkpoint_name(config, f"{module}.weight").removesuffix(".weight")
        wrapped = (around + named.removeprefix(plain) for around, plain in WRAPPED if named.startswith(plain))
        return named, *wrapped

    return CheckpointScheme(config.quantization, names_of)


def torch_dtype(name: str, config: ModelConfig) -> torch.dtype:
    """The torch type that ``name`` ("auto": the type the weights were saved in) stands for."""
    name = config.dtype if name == "auto" else name
    if name not in DTYPES:
        raise ModelError(f"dtype is {name!r}; allowed: auto, {', '.join(DTYPES)}")
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


FP8_QUERIES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.float16, torch.bfloat16)}
"""The types of queries over a pool of FP8, by device."""


def kv_dtype(wanted: KVCacheDtype, config: ModelConfig, dtype: torch.dtype, device: str) -> torch.dtype:
    """The type of the pool's numbers, of a model of type ``dtype`` on a ``device`` of this kind. ModelError
    where FP8 is wanted of a model that keeps latents or no K and V, or of a type or device without kernels
    for it."""
    if wanted == "auto":
        return dtype
    kinds = {kept.kind for layer in config.kept() for kept in layer}
    if "latent" in kinds or kinds == {"state"}:
        keeps = "latents" if "latent" in kinds else "states"
        raise ModelError(
            f"kv_cache_dtype is {wanted!r}; allowed: auto for {config.architecture}, which keeps {keeps}"
        )
    if dtype not in FP8_QUERIES[device]:
        allowed = ", ".join(dtype_name(each) for each in FP8_QUERIES[device])
        raise ModelError(
            f"kv_cache_dtype is {wanted!r}; allowed: auto with dtype {dtype_name(dtype)} on {device}, or "
            f"another dtype: {allowed}"
        )
    if wanted == "fp8-dynamic":
        _check_scaled(config, device)
    return FP8


def _check_scaled(config: ModelConfig, device: str) -> None:
    """ModelError unless there are kernels here for K and V with scales by block."""
    kept = [kv for layer in config.kept() for kv in layer if isinstance(kv, TokenKV)]
    if device != "cpu" or native() is None:
        where = f"on {device}" if device != "cpu" else "without a compiler (see docs/install.md)"
        raise ModelError(f"kv_cache_dtype is 'fp8-dynamic'; allowed {where}: auto, fp8")
    unfit = next((kv.dim for kv in kept if not CpuPlan.takes(FP8, kv.dim)), None)
    if unfit is not None:
        of = f"{config.architecture}, of heads of {unfit}"
        raise ModelError(f"kv_cache_dtype is 'fp8-dynamic'; allowed for {of}: auto, fp8")


def kv_scale_bytes(wanted: KVCacheDtype) -> int:
    """The bytes of the scale that each block has for each head."""
    return SCALE_BYTES if wanted == "fp8-dynamic" else 0


def kv_scales_of(model: CausalLM) -> dict[int, KVScales]:
    """The scales that K and V of each attention layer of a rank have in FP8, by the layer's index in the
    whole model. ModelError for a scale that none can be divided by."""
    return {each.number: each.scales_in_fp8() for each in model.modules() if isinstance(each, Attention)}


def kv_layout(
    config: ModelConfig,
    block_size: int,
    dtype: torch.dtype,
    shard: Shard | None = None,
    scale_bytes: int = 0,
) -> KVLayout:
    """The layout of the pool, whose numbers are of type ``dtype``, of the model or of the rank that ``shard``
    names. ``scale_bytes``: see ``KVLayout``. Raises ModelError for groups that cannot share pages."""
    ranks = 1 if shard is None else shard.tp_size
    layers = None if shard is None else shard.layers
    try:
        return KVLayout.of(config.kept(ranks), block_size, dtype.itemsize, layers, scale_bytes)
    except KVLayoutError as error:
        raise ModelError(f"block_size {block_size}: {error}") from None


def new_page_pool(layout: KVLayout, num_pages: int, dtype: torch.dtype, device: str | torch.device) -> Tensor:
    """A zeroed pool: [num_pages, numbers of a page] or, if the layout is plain, [num_blocks, kv_heads,
    layers, 2, block_size, head_dim]."""
    if layout.is_plain:
        _, heads, layers, _, block_size, dim = layout.view_shape(0, num_pages)
        return new_pool(num_pages, heads, layers, block_size, dim, dtype=dtype, device=torch.device(device))
    pool = torch.empty((num_pages, layout.page_bytes // dtype.itemsize), dtype=dtype, device=device)
    if pool.device.type == "cpu":
        advise_large_pages(pool)
    return pool.zero_()


def new_kv_pool(
    config: ModelConfig,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: str | torch.device,
    shard: Shard | None = None,
) -> Tensor:
    """A zeroed KV pool for the model: [num_blocks, kv_heads, layers, 2, block_size, head_dim]. With
    ``shard``, its heads and layers alone."""
    heads, layers = _heads_and_layers(config, shard)
    dim = config.head_dim
    return new_pool(num_blocks, heads, layers, block_size, dim, dtype=dtype, device=torch.device(device))


def kv_block_bytes(
    config: ModelConfig, block_size: int, dtype: torch.dtype, shard: Shard | None = None
) -> int:
    """The size of one block of the pool, in bytes: all heads and layers, or those of ``shard``."""
    heads, layers = _heads_and_layers(config, shard)
    return heads * layers * 2 * block_size * config.head_dim * dtype.itemsize


def _heads_and_layers(config: ModelConfig, shard: Shard | None) -> tuple[int, int]:
    if shard is None:
        return config.num_kv_heads, config.num_layers
    return len(shard.kv_heads), len(shard.layers)


def weight_files(path: Path) -> list[WeightFile]:
    """The safetensors files in the directory. ModelError if there are none, or not all that are listed, or
    one is not whole."""
    return [*map(WeightFile.of, _paths_of_weights(path))]


def _paths_of_weights(path: Path) -> list[Path]:
    if (path / SINGLE_FILE).is_file():
        return [path / SINGLE_FILE]
    index = path / INDEX_FILE
    if not index.is_file():
        pickled = next((file.name for pattern in PICKLES for file in sorted(path.glob(pattern))), None)
        if pickled:
            raise ModelError(f"{path}: weights are pickled ({pickled}); only safetensors are loaded")
        raise ModelError(f"{path}: no weights: neither {SINGLE_FILE} nor {INDEX_FILE}")
    names = _names_in(index)
    for name in names:
        if Path(name).name != name:
            raise ModelError(f"{index}: shard {name} lies outside the directory")
        if len(name.encode(errors="replace")) > MOST_NAME_BYTES or not (path / name).is_file():
            raise ModelError(f"{path}: shard {name} is missing ({INDEX_FILE} lists it)")
    return [path / name for name in names]


def _names_in(index: Path) -> list[str]:
    """The files that an index names, each once."""
    try:
        listed = read_object(index).get("weight_map")
    except ModelError as error:
        raise ModelError(f"{index}: cannot be read as an index of weights ({error})") from error
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
        raise ModelError(f"{index}: cannot be read as an index of weights (weight_map is no object of names)")
    return sorted(set(listed.values()))


def places_of(model: CausalLM, whole: CausalLM) -> TensorPlaces:
    """The places of the tensors of ``model``, all or a rank's part of the ``whole`` one."""
    config = model.config
    return TensorPlaces(
        of_rank=model.checkpoint_tensors(),
        shapes={name: place.shape for name, place in whole.checkpoint_tensors().items()},
        owner=config.architecture,
        name_of=lambda name: _usual(_unwrapped(name), config),
        harmless=lambda file, name: _harmless(file, name, config),
    )


def fill(
    places: TensorPlaces,
    path: Path,
    files: Sequence[WeightFile],
    progress: Progress = lambda done, total: None,
) -> None:
    """Fill each place exactly once from the files in the directory ``path``, and read nothing else.
    ModelError for a tensor without a place, and for one that does not fit or is missing."""
    expected = ExpectedTensors(places, path)
    done, total = 0, sum(file.num_bytes for file in files)
    for file in files:
        for name, header in file.tensors.items():
            place = expected.place_of(file, name, header)
            if place is not None:
                _load(file, name, place, expected.shape_of(name))
            done += len(header.data)
            progress(done, total)
    expected.check_all_came()
    progress(total, total)


def _load(file: WeightFile, name: str, place: Place, shape: torch.Size) -> None:
    direct = place.direct(shape)
    if direct is not None and file.read_into(name, direct):
        return
    try:
        place.load(file.tensor(name).reshape(shape))
    except ValueError as error:
        raise ModelError(f"{file.path}: tensor {name}: {error}") from None


def fill_all(module: nn.Module, path: Path, *, owner: str) -> None:
    """Fill a module whose parameters have the names of the tensors in the directory ``path``."""
    tensors = module.state_dict()
    places = {name: Place(tensor, (slice(None),) * tensor.dim()) for name, tensor in tensors.items()}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    fill(TensorPlaces(places, shapes, owner), path, weight_files(path))


def as_saved(config: ModelConfig, files: Sequence[WeightFile]) -> ModelConfig:
    """The config with what the files say of the output head and of the names of the experts' tensors."""
    if config.tie_word_embeddings and _have_own_head(files):
        config = replace(config, tie_word_embeddings=False)
    return _with_names_of(files, config)


def _have_own_head(files: Sequence[WeightFile]) -> bool:
    """Whether the files hold an output head unlike the embedding. Configs of models with an encoder, too,
    say by default that both are one; transformers believes the files then."""
    ends = "lm_head.weight", "model.embed_tokens.weight"
    found = [(file, name) for file in files for name in file.tensors if _unwrapped(name) in ends]
    if len(found) != len(ends):
        return False
    head, embedding = (file.tensor(name) for file, name in found)
    return head.dtype != embedding.dtype or not torch.equal(head, embedding)


def _with_names_of(files: Sequence[WeightFile], config: ModelConfig) -> ModelConfig:
    """The config with the names that the files have of the experts' tensors. Those who quantize models take
    experts apart."""
    rule = config.experts
    if rule is None:
        return config
    others = [] if rule.other_names is None else [rule.other_names]
    if config.quantization is not None and rule.names.form != "separate":
        others.append(SEPARATE)
    for other in others:
        down = re.compile(r"\b" + r"\d+".join(map(re.escape, other.down.split("{}"))) + "(?:[._]|$)")
        if any(down.search(name) for file in files for name in file.tensors):
            return replace(config, experts=replace(rule, names=other))
    return config


def _harmless(file: WeightFile, name: str, config: ModelConfig) -> bool:
    """Whether a tensor is one that checkpoints carry though it follows from the config or from other tensors,
    or adds nothing, or belongs to a part of the model that is left out."""
    unused = () if config.quantization is None else config.quantization.unused
    if any(part in name for part in config.ignored) or name.endswith(unused):
        return True
    quantized = config.quantization is not None
    if quantized and name.endswith(".bias") and not file.tensor(name).any():  # AutoGPTQ's
        return True
    return name.endswith(".rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings)


def _usual(name: str, config: ModelConfig) -> str:
    """The name that most quantized checkpoints have for a tensor with this name."""
    return name if config.quantization is None else config.quantization.tensor_name(name)


def _unwrapped(name: str) -> str:
    """The name of a language model's tensor without what stands around it in a checkpoint that has an
    encoder, too."""
    for wrapped, plain in WRAPPED:
        if name.startswith(wrapped):
            return plain + name.removeprefix(wrapped)
    return name


def _draw_weights(model: CausalLM, shapes: Mapping[str, torch.Size], seed: int) -> None:
    """Sets norms' factors to 1 and biases to 0, and draws matrices scaled so that activations neither fade
    nor blow up. A rank draws each matrix of which it has a part, and draws it whole."""
    places = model.checkpoint_tensors()
    seeds = itertools.count(seed)
    for name, shape in shapes.items():
        matrix_seed = next(seeds) if len(shape) > 1 else 0
        if name not in places:
            continue
        place = places[name]
        tensor = place.tensor
        if name.endswith("bias"):
            tensor.zero_()
        elif len(shape) <= 1:
            place.make_neutral(model.config.norm_offset)
        else:
            place.draw(shape, model.dtype, torch.Generator(tensor.device).manual_seed(matrix_seed))
