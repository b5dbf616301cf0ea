"""Copies of whole KV blocks: one Triton launch for all of them on CUDA, plain torch elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from baton_kernels.kv_fp8 import in_place


def copy_blocks(target: Tensor, target_ids: Tensor, source: Tensor, source_ids: Tensor) -> None:
    """Copies block ``source_ids[i]`` of ``source`` to block ``target_ids[i]`` of ``target``, for all i.

    Both tensors are [num_blocks, ...], contiguous, with blocks of one shape; ids are [C] int64, and no block
    that is written is read as well. On CUDA either tensor may lie in pinned host memory, which the kernel
    reaches over the bus; the ids are on the device then.
    """
    if target.shape[1:] != source.shape[1:] or target.dtype != source.dtype:
        raise ValueError(
            f"blocks of {tuple(source.shape[1:])} {source.dtype} do not fit those of "
            f"{tuple(target.shape[1:])} {target.dtype}"
        )
    if "cuda" in (target.device.type, source.device.type):
        from baton_kernels.cuda import blocks  # triton is only there where CUDA is

        with torch.cuda.device(target_ids.get_device()):  # triton launches on the current device
            blocks.copy_blocks(target, target_ids, source, source_ids)
    else:
        in_place(target).index_copy_(0, target_ids, in_place(source).index_select(0, source_ids))
