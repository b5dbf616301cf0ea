"""Copies between host and device that wait for nothing.

A copy from memory that is not pinned makes the host wait for all that the stream has to do before it: a whole
forward pass. Pinned memory comes from torch's cache, which hands it out again when the copy is over.
"""

from __future__ import annotations

import torch
from torch import Tensor


def host_buffer(size: int, device: torch.device) -> Tensor:
    """Return [size] int64 zeros in host memory from which ``device`` copies by itself."""
    return torch.zeros(size, dtype=torch.int64, pin_memory=device.type == "cuda")


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a host tensor's content on ``device``, in the order of the current stream. On a CPU it is the
    tensor itself."""
    if device.type != "cuda":
        return tensor
    pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
    return pinned.to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """Return a tensor's content in host memory. From a device it is there when the current stream has come so
    far; what is read before is undefined."""
    return tensor.to("cpu", non_blocking=True)
