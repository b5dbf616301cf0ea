"""The memory that a checkpoint takes on a CPU beside the bytes of its files: once loaded, and at most.

    python -m loadtest.resident DIRECTORY... [--dtype bfloat16] [--quantization auto]
    python -m loadtest.resident --shapes qwen-0.5b,mla-0.3b --kept bf16,fp8

Each checkpoint is loaded in a process of its own. Figures are what the process has more than before it began
to load: anonymous memory, the pages of files that are still mapped, and the peak of both. ``--shapes`` writes
random weights of well-known shapes first, plain or as codes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import cast, get_args

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.models.loader import load_model, weight_files
from baton.models.quantization.registry import Quantization
from baton_kernels.cpu.library import native
from loadtest.shapes import SHAPES, save_random

BLOCK = 128
NV_GROUP = 16
FP4_NUMBERS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
"""What codes of e2m1 stand for, by their lowest three bits."""
STATUS = Path("/proc/self/status")
RESET_PEAK = "5"
"""A text that has the system forget the peak, written to clear_refs (proc(5))."""


@dataclass(frozen=True, slots=True)
class Resident:
    """The memory of a process that loads a checkpoint, in bytes."""

    files: int
    anonymous: int
    mapped: int
    """Pages of files."""
    peak: int


def measure(path: Path, dtype: str, quantization: Quantization) -> Resident:
    """Load the checkpoint in this process."""
    native()  # built and loaded before, as it is in a worker
    torch.empty(1).add_(1)
    Path("/proc/self/clear_refs").write_text(RESET_PEAK)
    before = _status()
    model = load_model(path, dtype, quantization=quantization)
    after = _status()
    assert not model.training
    return Resident(
        files=sum(file.num_bytes for file in weight_files(path)),
        anonymous=after["RssAnon"] - before["RssAnon"],
        mapped=after["RssFile"] - before["RssFile"],
        peak=after["VmHWM"] - before["VmRSS"],
    )


def _status() -> dict[str, int]:
    """The system's figures of this process's memory, in bytes."""
    lines = (line.split() for line in STATUS.read_text().splitlines())
    return {name[:-1]: int(rest[0]) << 10 for name, *rest in lines if rest[1:] == ["kB"]}


def fp8_blocks(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A matrix as codes of FP8, with a scale for each block of 128 x 128."""
    rows, inputs = tensor.shape
    padded = torch.nn.functional.pad(tensor.float(), (0, -inputs % BLOCK, 0, -rows % BLOCK))
    across, along = (size // BLOCK for size in padded.shape)
    blocks = padded.view(across, BLOCK, along, BLOCK)
    scales = blocks.abs().amax(dim=(1, 3)) / torch.finfo(torch.float8_e4m3fn).max
    codes = (blocks / scales[:, None, :, None]).view_as(padded)[:rows, :inputs]
    return {name: codes.to(torch.float8_e4m3fn).contiguous(), f"{name}_scale_inv": scales}


def int4_groups(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A matrix as whole numbers of 4 bits, eight in a word, with a scale for each row's groups of 128 inputs,
    as compressed-tensors packs them."""
    rows, inputs = tensor.shape
    groups = tensor.float().view(rows, inputs // BLOCK, BLOCK)
    scales = (groups.abs().amax(dim=2) / 7.5).bfloat16()
    codes = (groups / scales.float()[..., None]).round().clamp(-8, 7).view(rows, inputs).int() + 8
    half_bytes = codes[:, 0::2] | codes[:, 1::2] << 4
    return {
        f"{name}_packed": half_bytes.to(torch.uint8).view(torch.int32),
        f"{name}_scale": scales,
        f"{name}_shape": torch.tensor(tensor.shape),
    }


def nvfp4(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A matrix as numbers of 4 bits, two in a byte, with an e4m3 scale for each row's groups of 16 inputs and
    a factor, as compressed-tensors packs them."""
    rows, inputs = tensor.shape
    groups = tensor.float().view(rows, inputs // NV_GROUP, NV_GROUP)
    largest, most = float(groups.abs().max()), torch.finfo(torch.float8_e4m3fn).max
    factor = most * float(FP4_NUMBERS[-1]) / largest
    scales = (groups.abs().amax(dim=2) / FP4_NUMBERS[-1] * factor).to(torch.float8_e4m3fn)
    numbers = (groups / (scales.float() / factor)[..., None]).view(rows, inputs)
    halfway = (FP4_NUMBERS[1:] + FP4_NUMBERS[:-1]) / 2
    codes = torch.bucketize(numbers.abs(), halfway).int() | (numbers < 0).int() << 3
    return {
        f"{name}_packed": (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8),
        f"{name}_scale": scales,
        f"{name}_global_scale": torch.tensor([factor]),
    }


def _compressed(kind: str, weights: Mapping[str, object]) -> Mapping[str, object]:
    """The quantization_config of compressed-tensors with all layers' matrices in one format."""
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}}
    method = {"quant_method": "compressed-tensors", "format": kind}
    return {**method, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


@dataclass(frozen=True, slots=True)
class Form:
    """A form in which matrices of layers are written."""

    config: Mapping[str, object]
    """The checkpoint's quantization_config."""
    tensors: Callable[[str, Tensor], dict[str, Tensor]]


_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": BLOCK}
_NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": NV_GROUP}
FORMS: Mapping[str, Form] = MappingProxyType(
    {
        "fp8": Form({"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}, fp8_blocks),
        "int4": Form(_compressed("pack-quantized", _INT4), int4_groups),
        "nvfp4": Form(_compressed("nvfp4-pack-quantized", _NVFP4), nvfp4),
    }
)


def save_quantized(plain: Path, path: Path, form: Form) -> Path:
    """Write the plain checkpoint to ``path`` (created) with the matrices of its layers in this form."""
    path.mkdir(parents=True)
    config = json.loads((plain / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": dict(form.config)}))
    tensors = dict[str, Tensor]()
    for name, tensor in load_file(plain / "model.safetensors").items():
        is_matrix = tensor.dim() == 2 and name.endswith(".weight") and "_proj" in name
        tensors |= form.tensors(name, tensor) if is_matrix else {name: tensor}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def in_own_process(path: Path, dtype: str, quantization: str) -> Resident:
    """The figures of a process that does nothing else."""
    command = [sys.executable, "-m", "loadtest.resident", "--alone", str(path)]
    told = subprocess.run(
        [*command, "--dtype", dtype, "--quantization", quantization], check=True, stdout=subprocess.PIPE
    )
    return Resident(**json.loads(told.stdout))


def write_shapes(names: list[str], kept: list[str], under: Path) -> list[Path]:
    """Write checkpoints of these shapes, each in every form; bf16: plain."""
    paths: list[Path] = []
    for name in names:
        plain = save_random(under / f"{name}-bf16", SHAPES[name])
        for form in kept:
            path = under / f"{name}-{form}"
            paths.append(plain if form == "bf16" else save_quantized(plain, path, FORMS[form]))
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("directories", type=Path, nargs="*")
    parser.add_argument("--shapes", default="", help="names of loadtest.shapes")
    parser.add_argument("--kept", default="bf16,fp8", help=f"bf16, {', '.join(FORMS)}")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="auto", choices=get_args(Quantization))
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.alone:
        quantization = cast(Quantization, chosen.quantization)
        print(json.dumps(asdict(measure(chosen.directories[0], chosen.dtype, quantization))))
        return
    table = Table("checkpoint", "files MB", "anonymous MB", "mapped MB", "loaded / files", "peak / files")
    with tempfile.TemporaryDirectory() as folder:
        shapes = [*filter(None, chosen.shapes.split(","))]
        written = write_shapes(shapes, chosen.kept.split(","), Path(folder))
        for path in [*chosen.directories, *written]:
            found = in_own_process(path, chosen.dtype, chosen.quantization)
            sizes = (found.files, found.anonymous, found.mapped)
            loaded = (found.anonymous + found.mapped) / found.files
            ratios = (loaded, found.peak / found.files)
            table.add_row(path.name, *(f"{size / 1e6:.1f}" for size in sizes), *(f"{n:.2f}" for n in ratios))
    Console().print(table)


if __name__ == "__main__":
    main()
