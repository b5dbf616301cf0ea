"""Writes packed_references.safetensors: small weights as the formats' own packages pack and read them.

Not a test: the packages need others that the project does not have. With AutoAWQ 0.2.9, gptqmodel 7.7.0 and
nvidia-modelopt 0.47.0 unpacked in three folders, and what they import installed (accelerate, logbar, pypcre,
device-smi, tokenicer, defuser, threadpoolctl, omegaconf, pulp, scipy, pydantic):

    GPTQMODEL_DISABLE_PACK_EXT=1 python -m tests.support.packed_references AUTOAWQ GPTQMODEL MODELOPT"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.support.packed_models import to_groups

FILE = Path(__file__).with_suffix(".safetensors")
OUTPUTS, INPUTS, GROUP = 32, 64, 32


def weight(seed: int) -> nn.Linear:
    """A projection whose rows are not centred."""
    linear = nn.Linear(INPUTS, OUTPUTS, bias=False)
    drawn = torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(seed))
    linear.weight.data = drawn / 8 + torch.linspace(-0.2, 0.2, OUTPUTS)[:, None]
    return linear


def gptq(folder: str, bits: int, *, ordered: bool, version: int) -> Mapping[str, Tensor]:
    """What gptqmodel packs, and what the numbers are that it reads again."""
    sys.path.insert(0, folder)
    kernel = import_module("gptqmodel.nn_modules.qlinear.torch").TorchLinear
    convert = import_module("gptqmodel.utils.model").convert_gptq_v2_to_v1_format_module
    linear, groups = weight(bits), torch.arange(INPUTS) // GROUP
    if ordered:
        groups = groups[torch.randperm(INPUTS, generator=torch.Generator().manual_seed(1))]
    _, scales, zeros = to_groups(linear.weight.data, groups, bits, symmetric=False)
    packed = kernel(
        bits=bits,
        group_size=GROUP,
        sym=False,
        desc_act=ordered,
        in_features=INPUTS,
        out_features=OUTPUTS,
        bias=False,
        pack_dtype=torch.int32,
        register_buffers=False,
    )
    packed.pack(linear, scales.float(), zeros.float(), groups.int())
    packed.qzero_format(format=2)
    stands_for = packed.dequantize_weight().T
    if version == 1:
        convert(packed, SimpleNamespace(bits=bits, pack_dtype=torch.int32))
    names = ("qweight", "qzeros", "scales", "g_idx")
    return {**{name: getattr(packed, name) for name in names}, "stands_for": stands_for}


def awq(folder: str) -> Mapping[str, Tensor]:
    """What AutoAWQ packs, and what the numbers are that it reads again."""
    for name in ("awq", "awq.modules", "awq.modules.linear", "awq.utils"):  # whose imports are too old
        package = ModuleType(name)
        package.__path__ = [str(Path(folder, *name.split(".")))]
        sys.modules[name] = package
    kernel = import_module("awq.modules.linear.gemm").WQLinear_GEMM
    read = import_module("awq.utils.packing_utils").dequantize_gemm
    linear = weight(3)
    _, scales, zeros = to_groups(linear.weight.data, torch.arange(INPUTS) // GROUP, 4, symmetric=False)
    packed = kernel.from_linear(linear, 4, GROUP, scales=scales.mT.contiguous(), zeros=zeros.mT.contiguous())
    stands_for = read(packed.qweight, packed.qzeros, packed.scales, 4, GROUP).T
    tensors = {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales")}
    return {**tensors, "stands_for": stands_for}


def nvfp4(folder: str) -> Mapping[str, Tensor]:
    """What ModelOpt packs, and what the numbers are that it reads again."""
    sys.path.insert(0, folder)
    kernel = import_module("modelopt.torch.quantization.qtensor.nvfp4_tensor").NVFP4QTensor
    linear = weight(4)
    packed, scale, factor = kernel.quantize(linear.weight.data.clone(), 16)
    read = packed.dequantize(torch.float32, scale=scale, double_scale=factor, block_sizes={-1: 16})
    tensors = {"weight": packed._quantized_data, "weight_scale": scale, "weight_scale_2": factor}
    return {**tensors, "stands_for": read}


def main(autoawq: str, gptqmodel: str, modelopt: str) -> None:
    """Write the file."""
    found = {
        "gptq-4": gptq(gptqmodel, 4, ordered=False, version=1),
        "gptq-4-ordered": gptq(gptqmodel, 4, ordered=True, version=2),
        "gptq-8": gptq(gptqmodel, 8, ordered=False, version=1),
        "awq": awq(autoawq),
        "nvfp4": nvfp4(modelopt),
    }
    save_file(
        {f"{name}.{end}": t.contiguous() for name, tensors in found.items() for end, t in tensors.items()},
        FILE,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
