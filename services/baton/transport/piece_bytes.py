"""The bytes of a piece as a tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.transport.base import DeviceView


def byte_tensor(memory: memoryview | DeviceView) -> Tensor:
    """Return a tensor over these very bytes."""
    if isinstance(memory, memoryview):
        return torch.frombuffer(memory, dtype=torch.uint8)
    if isinstance(memory.owner, Tensor):
        start = memory.pointer - memory.owner.data_ptr()
        return memory.owner[start : start + memory.nbytes]
    return torch.as_tensor(memory, device=f"cuda:{memory.device}")
