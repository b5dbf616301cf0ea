"""No kernel is compiled once a device serves: the warm-up has launched everything that serving launches."""

from __future__ import annotations

import json
import random
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
    once = {"_rotate_and_store", "_add_rms_norm", "_silu_mul", "_draw", "_adjust", "_bar_tokens", "_copy"}
    assert {name: builds[name] for name in once} == dict.fromkeys(once, 1)
    assert {"_decode", "_prefill"} == builds.keys() - once


def test_nor_does_drafting_by_a_model_of_another_shape() -> None:
    told = launched("llama", "float32", "llama-wide-heads")
    assert told["late"] == []
    builds = Counter(key.split()[0] for key in told["warm"])
    assert builds["_rotate_and_store"] == builds["_prefill"] == 2


def test_nor_do_experts_for_any_number_of_tokens() -> None:
    rng = random.Random(0)
    counts = [rng.choice((1, 2, rng.randint(1, 40), rng.randint(1, 2000))) for _ in range(150)]
    command = [sys.executable, "-m", "tests.support.expert_launches", json.dumps(counts)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr
    told = json.loads(result.stdout.splitlines()[-1])
    assert told["late"] == []
    assert told["launches"] > 5 * 150 - 300
    builds = {"_route": 1, "_sort": 1, "_sum": 1, "_gate_up_of_few": 1, "_down_of_few": 1}
    assert told["builds"] == {**builds, "_gate_up": 4, "_down": 4}


def test_late_builds_are_counted() -> None:
    """The hook that triton calls counts them, in a process of its own, which does not interpret."""
    program = """
import torch
from triton import knobs
from baton.engine.warm_up import late_builds
heard = []
knobs.runtime.jit_post_compile_hook = lambda **of_kernel: heard.append(of_kernel["key"])
from baton_kernels.cuda.rows import silu_mul
from loadtest.kernel_builds import building
with building(90):
    silu_mul(torch.zeros(2, 64))
    late = late_builds(torch.device("cuda"))
    silu_mul(torch.zeros(2, 64))
    assert late.count == 0
    silu_mul(torch.zeros(2, 66))
    silu_mul(torch.zeros(2, 66).bfloat16())
    assert (late.count, len(heard)) == (2, 3)
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=240)


def test_a_processor_has_none() -> None:
    import torch

    assert late_builds(torch.device("cpu")).count == 0
