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
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert result.returncode == 0, result.stdout + result.stderr
    told: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return told


@pytest.mark.deep
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
    once = {"_rotate_and_store", "_gated_product", "_draw", "_adjust", "_bar_tokens", "_copy"}
    assert {name: builds[name] for name in once} == dict.fromkeys(once, 1)
    assert builds["_add_norm"] == 2  # the first has nothing to add
    assert {"_decode", "_prefill", "_add_norm"} == builds.keys() - once


@pytest.mark.deep
def test_nor_does_attention_over_latents() -> None:
    told = launched("deepseek-v3", "bfloat16", "ngram")
    assert told["late"] == []
    builds = Counter(key.split()[0] for key in told["warm"])
    # Decoding rows and chunks have one each.
    latents = {"_absorbed": 2, "_join_absorbed": 2, "_expanded": 1, "_gather_latents": 1, "_store_latents": 1}
    assert {name: builds[name] for name in latents} == latents


@pytest.mark.deep
def test_nor_does_drafting_by_a_model_of_another_shape() -> None:
    told = launched("llama", "float32", "llama-wide-heads")
    assert told["late"] == []
    builds = Counter(key.split()[0] for key in told["warm"])
    assert builds["_rotate_and_store"] == builds["_prefill"] == 2


@pytest.mark.deep
def test_what_differs_from_step_to_step_compiles_no_other_kernel() -> None:
    """Nor do the sizes of windows, and the addresses of sinks."""
    program = """
import torch
from collections import Counter
from baton_kernels.activation import GELU_TANH, Activation
from baton_kernels.cuda import rows, whole_norm
from baton_kernels.cuda.attention import CudaPlan
from baton_kernels.norm import Norm
from baton_kernels.rotary import WholeNorm
from baton_kernels.window import ChunkedWindow
from tests.support.paged_steps import Case, lay_out
from tests.support.serving_launches import DEVICE, recording
x, residual = torch.zeros(2, 16, 64)
rms, layer = Norm(x[0], 1e-5, offset=1.0), Norm(x[0], 1e-5, centered=True, bias=x[1])
whole = WholeNorm(x[0, :32], x[0, :16], 1e-5)
with recording() as recorder:
    for number, size in ((1, 1), (2, 16), (16, 45)):
        window = ChunkedWindow(size)
        case = Case(4, 2, 64, 16, window, (number,) * number, ((number, 40), (number, 3)))
        pool, batch = lay_out(case)
        plan = CudaPlan.build(batch, pool, {window}, 4, DEVICE)
        q, sinks = torch.zeros(len(batch.positions), 4, 64), torch.zeros(20)[number : number + 4]
        plan.attend(pool, 0, q, scale=0.1, window=window, softcap=None, sinks=sinks)
        some, added = x[:number], residual[:number]
        rows.add_norm(some, added, layer, x.dtype, post=rms, factor=0.5)
        rows.gated_product(some, Activation("clamped_swiglu", 7.0))
        rows.activated(some, GELU_TANH)
        squares = whole_norm.squares_of_heads(some, whole)
        whole_norm.scale_heads(some, squares, whole, (64, 32))
builds = Counter(key.split()[0] for key in recorder.compiled)
# Decode has one for decoding rows, and one for short chunks.
assert builds.pop("_decode") == 2, builds
assert set(builds.values()) == {1} and len(builds) == 6, builds
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=800)


@pytest.mark.deep
def test_nor_do_layers_that_keep_a_state() -> None:
    """Each of their kernels is compiled once, for any rows, segments and layers."""
    program = """
import torch
from collections import Counter
from dataclasses import replace
from baton_kernels.cuda import causal_conv, delta_rule, mamba
from tests.support.serving_launches import recording
from tests.support.state_steps import DeltaCase, MambaCase, StateStep
few = {"taps": 3, "dtype": torch.bfloat16, "dims": (16, 16)}
with recording() as recorder:
    for layer, (queries, chunks) in enumerate([(1, ([1],)), (3, ([3, 16, 1], [17])), (2, [[64]] * 16)]):
        rows = {**few, "queries": queries, "chunks": chunks}
        case = DeltaCase.of({**rows, "kind": "gdn", "heads": (2, 2)})
        states = replace(case.step.states, layer=layer)
        delta_rule.linear_attention(case.layer, case.inputs, states, case.step.rows)
        sizes = {"units": 2, "heads": 2, "groups": "one", "limits": (0.0, 1.0)}
        case = MambaCase.of({**rows, **sizes})
        states = replace(case.step.states, layer=layer)
        mamba.mamba(case.projected, case.weights, case.sizes, states, case.step.rows)
builds = Counter(key.split()[0] for key in recorder.compiled)
assert builds.pop("_convolve_decode") == builds.pop("_convolve_chunks") == builds.pop("_keep") == 2, builds
assert builds == {"_advance_heads": 2, "_scan_heads": 2, "_relate": 1, "_finish": 1}, builds
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=800)


@pytest.mark.deep
def test_nor_do_experts_for_any_number_of_tokens() -> None:
    rng = random.Random(0)
    counts = [rng.choice((1, 2, rng.randint(1, 40), rng.randint(1, 2000))) for _ in range(150)]
    command = [sys.executable, "-m", "tests.support.expert_launches", json.dumps(counts)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert result.returncode == 0, result.stdout + result.stderr
    told = json.loads(result.stdout.splitlines()[-1])
    assert told["late"] == []
    assert told["launches"] > 5 * 150 - 300
    builds = {"_route": 1, "_sort": 1, "_sum": 1, "_gate_up_of_few": 1, "_down_of_few": 1}
    assert told["builds"] == {**builds, "_gate_up": 4, "_down": 4}


@pytest.mark.deep
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
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=800)


def test_a_processor_has_none() -> None:
    import torch

    assert late_builds(torch.device("cpu")).count == 0
