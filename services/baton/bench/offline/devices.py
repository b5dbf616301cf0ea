"""The devices of this machine."""

from __future__ import annotations

import torch

from baton.engine.defaults import StepSizes, defaults_of
from baton.engine.device import device_memory
from baton.engine.options import EngineOptions


def all_devices() -> list[str]:
    """Return the names of all CUDA devices, or the CPU's where there is none."""
    return [f"cuda:{index}" for index in range(torch.cuda.device_count())] or ["cpu"]


def sizes_on(device: str, options: EngineOptions) -> StepSizes:
    """Return the sizes that an engine with these options has on a device."""
    return options.sizes_with(defaults_of(device, device_memory(device)).sizes)
