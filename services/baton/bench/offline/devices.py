"""Which devices this machine has."""

from __future__ import annotations

import torch


def all_devices() -> list[str]:
    """Every CUDA device by its name, or the CPU where there is none."""
    return [f"cuda:{index}" for index in range(torch.cuda.device_count())] or ["cpu"]
