"""No kernel is compiled once a device serves: the warm-up has launched everything that serving launches."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from baton.engine.warm_up import late_builds

ROOT = Path(__file__).parents[2]
if find_spec("triton") is None:
    pytest.skip("triton has no build for this machine", allow_module_level=True)


def launched(family: str, dtype: str, drafts: str) -> dict[str, Any]:
    """In a process of its own: here, triton may have been told to interpret."""
    command = [sys.executable, "-m", "tests.support.serving_launches", family, dtype, drafts, "3"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr
    told: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return told


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", "float32"), ("qwen3-biased-window", "bfloat16")],
)
def test_serving_compiles_nothing_that_the_warm_up_has_not(family: str, dtype: str) -> None:
    told = launched(family, dtype, "ngram")
    assert told["late"] == []
    assert told["launches"] > 1000
    # Each kernel that depends on no window and no length of a chunk is compiled once, not for some numbers
    # of rows or some addresses.
    builds = Counter(key.split()[0] for key in told["warm"])
    once = {"_rotate_and_store", "_add_norm", "_gated_product", "_draw", "_adjust", "_bar_tokens", "_copy"}
    assert {name: builds[name] for name in once} == dict.fromkeys(once, 1)
    assert {"_decode", "_prefill"} == builds.keys() - once


def test_nor_does_drafting_by_a_model_of_another_shape() -> None:
    told = launched("llama", "float32", "llama-wide-heads")
    assert told["late"] == []
    builds = Counter(key.split()[0] for key in told["warm"])
    assert builds["_rotate_and_store"] == builds["_prefill"] == 2


def test_late_builds_are_counted() -> None:
    """The hook that triton calls counts them, in a process of its own, which does not interpret."""
    program = """
import torch
from triton import knobs
from baton.engine.warm_up import late_builds
heard = []
knobs.runtime.jit_post_compile_hook = lambda **of_kernel: heard.append(of_kernel["key"])
from baton_kernels.activation import SILU
from baton_kernels.cuda.rows import activated
from loadtest.kernel_builds import building
with building(90):
    activated(torch.zeros(2, 64), SILU)
    late = late_builds(torch.device("cuda"))
    activated(torch.zeros(2, 64), SILU)
    assert late.count == 0
    activated(torch.zeros(2, 66), SILU)
    activated(torch.zeros(2, 66).bfloat16(), SILU)
    assert (late.count, len(heard)) == (2, 3)
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=240)


def test_a_processor_has_none() -> None:
    import torch

    assert late_builds(torch.device("cpu")).count == 0
