"""The attention kernels beside torch's, and beside FlashInfer's where that is installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from baton_kernels.attention import AttentionPlan, paged_attention
from loadtest.gpu.bench import Bench, Section
from loadtest.kernels import contiguous, work
from tests.support.paged_steps import Case, lay_out, moved


def measure(bench: Bench) -> list[Section]:
    roof = bench.roof()
    columns = (
        "step",
        "ms",
        "GB/s",
        "of a copy",
        "TF/s",
        "of a matmul",
        "torch, contiguous, ms",
        "FlashInfer, ms",
    )
    section = Section("Attention of one layer", columns)
    if importlib.util.find_spec("flashinfer") is None:
        section.notes.append("FlashInfer is not installed.")
    for label, case in bench.scale.attention.items():
        case = replace(case, dtype=bench.scale.dtype)
        bytes_read, operations = work(case)
        pool, batch = moved(*lay_out(case, layers=1), bench.device)
        tokens = batch.positions.numel()
        q = torch.randn(tokens, case.heads, case.head_dim, device=bench.device).to(case.dtype)
        plan = AttentionPlan.build(batch, pool, {case.window})

        def run(pool: Tensor = pool, q: Tensor = q, plan: AttentionPlan = plan, case: Case = case) -> Tensor:
            return paged_attention(pool, 0, q, plan, scale=case.head_dim**-0.5, window=case.window)

        taken = bench.seconds(run)
        beside = (contiguous(case, bench.device), flashinfer(case, q))
        section.rows.append(
            (
                label,
                f"{taken * 1e3:.3f}",
                f"{bytes_read / taken / 1e9:.0f}",
                f"{bytes_read / taken / roof.bytes_per_s:.2f}",
                f"{operations / taken / 1e12:.1f}",
                f"{operations / taken / roof.flops:.2f}",
                *("-" if other is None else f"{bench.seconds(other) * 1e3:.3f}" for other in beside),
            )
        )
    return [section]


def flashinfer(case: Case, q: Tensor) -> Callable[[], object] | None:
    """FlashInfer's paged attention over the same lengths, in a pool of its own layout. None without it."""
    if importlib.util.find_spec("flashinfer") is None or q.device.type != "cuda":
        return None
    library: Any = importlib.import_module("flashinfer")
    page = case.block_size
    lengths = [*case.decode, *(cached + length for cached, length in case.chunks)]
    pages = torch.tensor([-(-length // page) for length in lengths], dtype=torch.int32)
    starts = torch.nn.functional.pad(pages.cumsum(0, dtype=torch.int32), (1, 0))
    last = torch.tensor([(length - 1) % page + 1 for length in lengths], dtype=torch.int32)
    places = torch.randperm(int(starts[-1])).int()
    shape = (int(starts[-1]), 2, page, case.kv_heads, case.head_dim)
    pool = torch.randn(shape, device=q.device, dtype=case.dtype)
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=q.device)
    described = [part.to(q.device) for part in (starts, places, last)]
    sizes = (case.heads, case.kv_heads, case.head_dim, page)
    window = -1 if case.window is None else case.window - 1
    if case.decode:
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(*described, *sizes, window_left=window, q_data_type=case.dtype)
    else:
        rows = torch.tensor([0, *(length for _, length in case.chunks)], dtype=torch.int32)
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        queries = rows.cumsum(0, dtype=torch.int32).to(q.device)
        wrapper.plan(queries, *described, *sizes, causal=True, window_left=window, q_data_type=case.dtype)
    return lambda: wrapper.run(q, pool)
