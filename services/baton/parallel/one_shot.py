"""Sums of small tensors over the ranks of one node in one kernel, through symmetric memory.

Every rank copies its part into memory that all of them see, and adds up all parts itself: one exchange, where
NCCL's ring takes several. Each rank reads what all ranks have, so this pays for small tensors only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

MOST_BYTES: Mapping[int, int] = MappingProxyType({2: 1 << 20, 4: 512 << 10, 8: 256 << 10})
"""The largest tensor that is summed in one shot, by the number of ranks: torch's kernel takes these numbers.
Beyond, the links carry more than they would in a ring."""
_DTYPES = (torch.float32, torch.bfloat16)
"""The dtypes of torch's kernel."""
_ALIGNMENT = 16


class OneShotSum:
    """The sum over all ranks of a group that share ``buffer``."""

    def __init__(self, buffer: Tensor, group: str) -> None:
        """``buffer``: [bytes] uint8 of symmetric memory; ``group``: the name under which it was shared."""
        self._buffer = buffer
        self._group = group

    def takes(self, partial: Tensor) -> bool:
        """Whether it sums such a tensor: the same on all ranks, whose tensors are alike."""
        return (
            partial.dtype in _DTYPES
            and 0 < partial.nbytes <= len(self._buffer)
            and partial.nbytes % _ALIGNMENT == 0
            and partial.is_contiguous()
        )

    def __call__(self, partial: Tensor) -> Tensor:
        """The sum; ``partial`` stays as it is. The kernel ends when all ranks have read the buffer."""
        shared = self._buffer[: partial.nbytes].view(partial.dtype).view(partial.shape)
        total: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(shared, partial, "sum", self._group)
        return total


def why_not(devices: Sequence[int], on_one_node: bool) -> str:
    """Why ranks on these devices, the first one's first, cannot sum in one shot; empty: nothing speaks
    against it from the first one's point of view."""
    if len(devices) not in MOST_BYTES:
        return f"{len(devices)} ranks; it takes {', '.join(map(str, MOST_BYTES))}"
    if not on_one_node:
        return "the ranks are on several nodes"
    if not hasattr(torch.ops.symm_mem, "one_shot_all_reduce_copy"):
        return "this torch has no kernel for it"
    first, *others = devices
    if not all(torch.cuda.can_device_access_peer(first, other) for other in others):
        return "a device cannot read another's memory"
    return ""


def share_buffer(store: Store, name: str, rank: int, size: int, device: torch.device) -> OneShotSum:
    """Shares a buffer with the other ranks of a group, which do the same at the same time. RuntimeError if
    that is not possible."""
    from torch._C._distributed_c10d import ProcessGroup, _register_process_group, _SymmetricMemory

    # Torch's kernels look their group up by name. Its only use there is to tell rank, size and store.
    group = ProcessGroup(store, rank, size)
    group._set_group_name(name)  # type: ignore[arg-type]  # a str by another name
    _register_process_group(name, group)  # type: ignore[arg-type]
    _SymmetricMemory.set_group_info(name, rank, size, store)
    buffer = _SymmetricMemory.empty_strided_p2p((MOST_BYTES[size],), (1,), torch.uint8, device, name)
    _SymmetricMemory.rendezvous(buffer, name)
    return OneShotSum(buffer, name)


def agreed(reason: str, count_of: Callable[[int], int], size: int) -> bool:
    """Whether no rank of ``size`` has a ``reason`` against it. ``count_of`` sums a number over all ranks: one
    that took another way than the rest would wait for ever."""
    return count_of(int(not reason)) == size
