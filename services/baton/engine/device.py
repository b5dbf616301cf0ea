"""What ``auto`` means for device and dtype."""

from __future__ import annotations

from pathlib import Path

import torch

from baton.models.config import ModelConfig
from baton_kernels.cpu.linear import kernels_for


def choose_device(wanted: str) -> str:
    """``auto`` is CUDA where there is one."""
    if wanted != "auto":
        return wanted
    return "cuda" if torch.cuda.is_available() else "cpu"


def has_bfloat16() -> bool:
    """Whether the processor has instructions for it, which torch's library takes."""
    has = torch.cpu.get_capabilities()
    return bool(has.get("avx512_bf16") or has.get("amx_bf16"))


def choose_dtype(wanted: str, device: str, model: Path) -> str:
    """``auto`` is the type the weights of ``model`` were saved in; on a CPU that cannot compute with it fast,
    float32. Baton's kernels can with bfloat16 on any, plain torch where there are instructions for it, and
    nothing with float16.

    Raises ModelError if the model's config cannot be read."""
    if wanted != "auto" or device != "cpu":
        return wanted
    saved = ModelConfig.from_dir(model).dtype
    if saved == "bfloat16" and kernels_for(torch.device(device), torch.bfloat16) is None:
        return saved if has_bfloat16() else "float32"
    return "float32" if saved == "float16" else saved
