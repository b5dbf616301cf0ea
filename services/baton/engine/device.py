"""The device and the dtype that ``auto`` stands for."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from baton.models.config import ModelConfig
from baton_kernels.cpu.linear import kernels_for

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""The file of the limit; it says "max" where there is none."""


def choose_device(wanted: str) -> str:
    """The device to use: ``auto`` is CUDA where there is one."""
    if wanted != "auto":
        return wanted
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_memory(name: str) -> int:
    """The memory of a CUDA device, in bytes; 0 for a CPU, whose memory is not its own."""
    device = exact_device(name)
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def machine_memory() -> int:
    """The memory of this machine, in bytes, or as much of it as this process's control group may use."""
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = CGROUP_LIMIT.read_text().strip()
    except OSError:
        return installed
    return min(installed, int(limit)) if limit.isdecimal() else installed


def exact_device(name: str) -> torch.device:
    """The device of this name; one of CUDA with its number: the number of the calling thread's device where
    the name has none."""
    device = torch.device(name)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def enter_device(device: torch.device) -> None:
    """Makes a CUDA device the calling thread's own. Every thread begins on device 0, and what names no device
    (a stream, a synchronization, a library's kernel) happens there, which takes memory there as well."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def has_bfloat16() -> bool:
    """Whether the processor has bfloat16 instructions that torch's library uses."""
    has = torch.cpu.get_capabilities()
    return bool(has.get("avx512_bf16") or has.get("amx_bf16"))


def choose_dtype(wanted: str, device: str, model: Path) -> str:
    """The dtype to use: ``auto`` is the type the weights of ``model`` were saved in; on a CPU that cannot
    compute with it fast, float32. Baton's kernels compute fast with bfloat16 on any CPU, plain torch where
    there are instructions for it, and neither with float16.

    Raises ModelError if the model's config cannot be read."""
    if wanted != "auto" or device != "cpu":
        return wanted
    saved = ModelConfig.from_dir(model).dtype
    if saved == "bfloat16" and kernels_for(torch.device(device), torch.bfloat16) is None:
        return saved if has_bfloat16() else "float32"
    return "float32" if saved == "float16" else saved
