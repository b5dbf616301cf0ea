"""What ``auto`` means for device and dtype."""

from __future__ import annotations

import torch


def choose_device(wanted: str) -> str:
    """``auto`` is CUDA where there is one."""
    if wanted != "auto":
        return wanted
    return "cuda" if torch.cuda.is_available() else "cpu"


def choose_dtype(wanted: str, device: str) -> str:
    """``auto`` is the type the weights were saved in, except on a CPU without bfloat16 instructions, where
    float32 is two to five times faster (measured on the demo model)."""
    if wanted != "auto" or device != "cpu":
        return wanted
    native = torch.cpu.get_capabilities()
    return "auto" if native.get("avx512_bf16") or native.get("amx_bf16") else "float32"
