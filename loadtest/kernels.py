"""The Triton kernels: what they are built into, and how near they come to what a device can do.

    python -m loadtest.kernels            # needs a CUDA device
    python -m loadtest.kernels --compile  # needs none

The first measures each attention kernel (medians of triton's ``do_bench``, which empties the cache between
runs), with the bytes it must read or the operations it must do as a share of the bandwidth of a copy and of
the rate of a large matmul measured just before. torch's ``scaled_dot_product_attention`` stands beside it,
over the same lengths, contiguous instead of paged.

``--compile`` builds each for compute capability 8.0 and 9.0 and shows registers, shared memory and spills. It
fails if one spills, or wants more shared memory than there is.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tests.support.paged_steps import Case, lay_out, moved

ARCHS = (80, 90)
HEAD_DIMS = (64, 128, 256)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
STEPS: dict[str, Case] = {
    "decode": Case(8, 2, 0, 64, None, (200, 70), ()),
    "prefill, up to 16 rows": Case(8, 2, 0, 64, None, (), ((100, 4),)),
    "prefill, up to 64 rows": Case(8, 2, 0, 64, None, (), ((100, 16),)),
    "prefill": Case(8, 2, 0, 64, None, (), ((100, 200),)),
}
"""Steps that are computed by one kernel each, but for the merge behind decode."""


@dataclass(frozen=True)
class Variant:
    step: str
    head_dim: int
    dtype: str
    all_features: bool
    """Window, soft-cap and blocks smaller than a tile; or none of these."""

    @property
    def case(self) -> Case:
        case = replace(STEPS[self.step], head_dim=self.head_dim, dtype=DTYPES[self.dtype])
        return replace(case, window=40, softcap=30.0, block_size=16) if self.all_features else case


def variants(dtypes: Sequence[str], steps: Sequence[str], features: Sequence[bool]) -> Iterator[Variant]:
    for dtype in dtypes:
        for head_dim in HEAD_DIMS:
            for step in steps:
                for all_features in features:
                    yield Variant(step, head_dim, dtype, all_features)


def build(wanted: Sequence[Variant]) -> bool:
    """Prints the table; whether every kernel fits its device."""
    from baton_kernels.cuda.attention import CudaPlan
    from baton_kernels.cuda.shapes import Device
    from loadtest.kernel_builds import SHARED_MEMORY, building

    table = Table(title="registers a thread / bytes of shared memory / bytes spilled, by compute capability")
    for column in ("kernel", "head_dim", "pool", "window, soft-cap", *(f"{arch / 10}" for arch in ARCHS)):
        table.add_column(column)
    fits = True
    for variant in track(wanted, transient=True, disable=not sys.stderr.isatty()):
        cells = []
        case = variant.case
        for arch in ARCHS:
            pool, batch = lay_out(case)
            q = torch.zeros(batch.positions.numel(), case.heads, case.head_dim, dtype=case.dtype)
            with building(arch) as builder:
                plan = CudaPlan.build(batch, pool, {case.window}, Device(132, arch))
                plan.attend(pool, 0, q, scale=0.1, window=case.window, softcap=case.softcap)
            built = builder.builds[0]
            fits = fits and not built.spilled and built.shared <= SHARED_MEMORY[arch]
            core = "".join(built.instructions) or "fma"
            cells.append(f"{built.registers} / {built.shared} / {built.spilled} ({core})")
        asked = "yes" if variant.all_features else "no"
        table.add_row(variant.step, str(variant.head_dim), variant.dtype, asked, *cells)
    Console(width=130).print(table)
    return fits


@dataclass(frozen=True)
class Roof:
    """What the device does at best."""

    bytes_per_s: float
    flops: float

    @classmethod
    def measure(cls, dtype: torch.dtype) -> Roof:
        source = torch.empty(1 << 29, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        copying = seconds(lambda: target.copy_(source))
        size = 8192
        a, b = torch.randn(2, size, size, device="cuda").to(dtype)
        return cls(2 * source.numel() / copying, 2 * size**3 / seconds(lambda: a @ b))


def seconds(run: Callable[[], object]) -> float:
    from triton.testing import do_bench

    return float(do_bench(run, return_mode="median")) / 1000


BENCHES: dict[str, Case] = {
    "decode, 1 x 32768": Case(32, 8, 128, 64, None, (32768,), ()),
    "decode, 64 x 4096": Case(32, 8, 128, 64, None, (4096,) * 64, ()),
    "decode, 256 x 1024": Case(32, 8, 128, 64, None, (1024,) * 256, ()),
    "decode, 131072 + 31 x 4096": Case(32, 8, 128, 64, None, (131072, *(4096,) * 31), ()),
    "decode, 64 x 4096, blocks of 16": Case(32, 8, 128, 16, None, (4096,) * 64, ()),
    "prefill, 8192": Case(32, 8, 128, 64, None, (), ((0, 8192),)),
    "prefill, 8 x 1024": Case(32, 8, 128, 64, None, (), ((0, 1024),) * 8),
    "prefill, 2048 behind 30720": Case(32, 8, 128, 64, None, (), ((30720, 2048),)),
    "prefill, 8192, blocks of 16": Case(32, 8, 128, 16, None, (), ((0, 8192),)),
    "prefill, 8192, window 1024": Case(32, 8, 128, 64, 1024, (), ((0, 8192),)),
}


def work(case: Case) -> tuple[int, int]:
    """Bytes of K and V that must be read at least, and operations: two products over what each query sees."""
    window = case.window or sys.maxsize
    rows = [(context - 1, 1) for context in case.decode] + list(case.chunks)
    read = sum(min(cached + length, window + length) for cached, length in rows)
    pairs = sum(min(cached + i + 1, window) for cached, length in rows for i in range(length))
    bytes_read = 2 * read * case.kv_heads * case.head_dim * case.dtype.itemsize
    return bytes_read, 4 * pairs * case.heads * case.head_dim


def contiguous(case: Case) -> Callable[[], Tensor] | None:
    """torch's attention over the same lengths without pages; None where it would need a mask."""
    lengths = {(n - 1, 1) for n in case.decode} | set(case.chunks)
    if len(lengths) != 1 or case.window is not None:
        return None
    ((cached, length),) = lengths
    if cached and length > 1:
        return None
    count = len(case.decode) + len(case.chunks)
    shape = (count, case.heads, length, case.head_dim)
    q = torch.randn(shape, device="cuda").to(case.dtype)
    shape = (2, count, case.kv_heads, cached + length, case.head_dim)
    k, v = torch.randn(shape, device="cuda").to(case.dtype)
    return lambda: scaled_dot_product_attention(q, k, v, is_causal=length > 1, enable_gqa=True)


def measure(dtype: torch.dtype) -> None:
    from baton_kernels.attention import AttentionPlan, paged_attention

    roof = Roof.measure(dtype)
    name = torch.cuda.get_device_name()
    title = f"{name}, {dtype}: copies {roof.bytes_per_s / 1e12:.2f} TB/s, matmul {roof.flops / 1e12:.0f} TF/s"
    table = Table("step", "ms", "GB/s", "of copy", "TF/s", "of matmul", "torch, contiguous: ms", title=title)
    for label, case in BENCHES.items():
        case = replace(case, dtype=dtype)
        bytes_read, operations = work(case)
        pool, batch = moved(*lay_out(case, layers=1), torch.device("cuda"))
        q = torch.randn(batch.positions.numel(), case.heads, case.head_dim, device="cuda").to(dtype)
        plan = AttentionPlan.build(batch, pool, {case.window})
        taken = seconds(
            lambda pool=pool, q=q, plan=plan, case=case: paged_attention(
                pool, 0, q, plan, scale=case.head_dim**-0.5, window=case.window
            )
        )
        beside = contiguous(case)
        table.add_row(
            label,
            f"{taken * 1e3:.3f}",
            f"{bytes_read / taken / 1e9:.0f}",
            f"{bytes_read / taken / roof.bytes_per_s:.0%}",
            f"{operations / taken / 1e12:.0f}",
            f"{operations / taken / roof.flops:.0%}",
            "-" if beside is None else f"{seconds(beside) * 1e3:.3f}",
        )
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--compile", action="store_true", help="build the kernels, run nothing")
    parser.add_argument("--quick", action="store_true", help="build only the largest of bfloat16")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16", help="what to measure with")
    args = parser.parse_args()
    if args.compile:
        if args.quick:
            wanted = list(variants(["bfloat16"], ["decode", "prefill"], [True]))
        else:
            wanted = list(variants(["bfloat16", "float32"], list(STEPS), [False, True]))
        if not build(wanted):
            sys.exit("a kernel spills registers or wants more shared memory than there is")
    elif not torch.cuda.is_available():
        sys.exit("loadtest.kernels: NOTHING MEASURED. It needs a CUDA device, and torch finds none here.")
    else:
        measure(DTYPES[args.dtype])


if __name__ == "__main__":
    main()
