"""Every Triton kernel builds for the devices it is meant for, without one, and keeps its registers."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [pytest.mark.deep, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]


def of_layer(layer: str, *kernels: str) -> list[str]:
    """The lines of a layer that keeps a state: its convolutions' kernels, and others."""
    return [layer, *(f"{layer}: {kernel}" for kernel in ("convolve_chunks", "keep", *kernels))]


@pytest.mark.skipif(find_spec("triton") is None, reason="triton has no build for this machine")
def test_they_build_and_do_not_spill() -> None:
    """In a process of its own: here, triton may have been told to interpret."""
    command = [sys.executable, "-m", "loadtest.kernels", "--compile", "--quick"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1700)
    assert result.returncode == 0, result.stdout + result.stderr
    built = [[cell.strip() for cell in line.split("│")] for line in result.stdout.splitlines() if "│" in line]
    names = [(kernel, head_dim) for _, kernel, head_dim, *_ in built]
    largest = [(k, size) for size in ("64", "128", "256") for k in ("decode", "prefill")]
    over_fp8 = [("decode", "128"), ("prefill", "128")]
    assert names[:10] == [*largest, ("verify, 64 rows", "128"), ("prefill", "48"), *over_fp8]
    assert [kernel for kernel, _ in names[10:]] == [
        "rotate, store",
        "norm, rotate, store",
        "KV write",
        "rotate, store",
        "add, RMS norm",
        "RMS norm",
        "layer norms, add",
        "RMS norm, add",
        "squares of heads",
        "scaling of heads",
        "norm of heads",
        "SiLU, mul",
        "GELU, mul",
        "clamped SwiGLU",
        "GELU",
        "squared ReLU",
        "block copy",
        "mask",
        "rules",
        "draw",
        "router",
        "few pairs",
        "few pairs: down_of_few",
        "tiles of 128",
        "tiles of 128: gate_up",
        "tiles of 128: down",
        "tiles of 128: sum",
        "int4 groups of 64, zeros, order, 64 rows",
        "int4 groups of 64, zeros, order, 64 rows: join",
        "latents, chunk",
        "latents, chunk: join_absorbed",
        "latents, expanded",
        "latents, expanded: gather_latents",
        "latents, expanded: store_latents",
        *of_layer("gdn", "advance_heads", "finish", "relate", "scan_heads"),
        *of_layer("kda", "advance_heads", "finish", "relate", "scan_heads"),
        *of_layer("Mamba-2", "advance_heads", "scan_heads"),
        "gated norm",
        *of_layer("short conv"),
    ]
    assert "wgmma" in result.stdout
    assert "tcgen05" in result.stdout
