"""The attention kernels beside torch's own, with cuDNN and with FlashAttention, and beside FlashInfer's where
that is installed.

Baton's are over pages anywhere in the pool; torch's have the same lengths side by side in memory, and only
where all are alike and no window is needed.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from baton_kernels.attention import AttentionPlan, paged_attention
from baton_kernels.window import ChunkedWindow
from loadtest.gpu.bench import Bench
from loadtest.kernels import BENCHES, work
from tests.support.paged_steps import Case, lay_out, moved

TABLE = "Attention of one layer"
TINY = {
    "decode": Case(4, 2, 16, 16, None, (40, 40), ()),
    "prefill": Case(4, 2, 16, 16, None, (), ((0, 33),)),
    "prefill, window": Case(4, 2, 16, 16, 8, (), ((0, 33),)),
}
BACKENDS = {"SDPA flash, ms": SDPBackend.FLASH_ATTENTION, "SDPA cuDNN, ms": SDPBackend.CUDNN_ATTENTION}


def measure(bench: Bench) -> None:
    """Measure every case."""
    roof = bench.roof()
    if importlib.util.find_spec("flashinfer") is None:
        bench.results.missing("FlashInfer", "it is not installed")
    for label, plain in (TINY if bench.dry else BENCHES).items():
        case = replace(plain, dtype=bench.dtype)
        bytes_read, operations = work(case)
        taken, q = ours(bench, case)
        rates = {
            "ms": taken * 1e3,
            "GB/s": bytes_read / taken / 1e9,
            "of a copy": bytes_read / taken / roof.bytes_per_s,
            "TF/s": operations / taken / 1e12,
            "of a matmul": operations / taken / roof.flops,
        }
        others = beside(bench, label, case, q)
        best = min((ms for ms in others.values() if ms is not None), default=None)
        share = None if best is None else best / rates["ms"]
        bench.results.row(TABLE, step=label, **rates, **others, **{"of the best other": share})


def ours(bench: Bench, case: Case) -> tuple[float, Tensor]:
    """Return the seconds of Baton's kernel, and its queries."""
    pool, batch = moved(*lay_out(case, layers=1, pool_on=str(bench.device)), bench.device)
    tokens = batch.positions.numel()
    q = torch.randn(tokens, case.heads, case.head_dim, device=bench.device).to(case.dtype)
    plan = AttentionPlan.build(batch, pool, {case.window}, case.heads)
    run = partial(paged_attention, pool, 0, q, plan, scale=case.head_dim**-0.5, window=case.window)
    return bench.seconds(run), q


def beside(bench: Bench, label: str, case: Case, q: Tensor) -> dict[str, float | None]:
    """Return the milliseconds of the others; None, and the reason among the results, where one cannot do
    it."""
    found: dict[str, float | None] = {}
    for name, backend in BACKENDS.items():
        found[name] = None
        inputs = contiguous(case, bench.device)
        if inputs is None:
            continue
        try:
            found[name] = bench.seconds(partial(by_torch, backend, *inputs)) * 1e3
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            bench.results.missing(f"{label}, {name.removesuffix(', ms')}", reason)
    if importlib.util.find_spec("flashinfer") is not None and bench.on_cuda:
        found["FlashInfer, ms"] = bench.seconds(by_flashinfer(case, q)) * 1e3
    return found


def by_torch(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=True)


def contiguous(case: Case, device: torch.device) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return queries, keys and values of the same lengths without pages; None where a mask would be needed,
    or lengths differ."""
    lengths = {(n - 1, 1) for n in case.decode} | set(case.chunks)
    if len(lengths) != 1 or case.window is not None:
        return None
    ((cached, length),) = lengths
    if cached and length > 1:
        return None
    count = len(case.decode) + len(case.chunks)
    q = torch.randn(count, case.heads, length, case.head_dim, device=device).to(case.dtype)
    shape = (2, count, case.kv_heads, cached + length, case.head_dim)
    k, v = torch.randn(shape, device=device).to(case.dtype)
    return q, k, v


def by_flashinfer(case: Case, q: Tensor) -> Callable[[], object]:
    """Return FlashInfer's paged attention over the same lengths, in a pool of its own layout."""
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
    if isinstance(case.window, ChunkedWindow):
        raise ValueError("chunked windows are none of flashinfer's")
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
