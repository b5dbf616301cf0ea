"""Bound launches give a kernel what triton's own launch gives it; in processes of their own, which do not
interpret."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
if find_spec("triton") is None:
    pytest.skip("triton has no build for this machine", allow_module_level=True)


def run(program: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=800
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.deep
def test_each_kernel_gets_the_same_parameters() -> None:
    run("""
from loadtest.launch_cost import all_launches
from loadtest.stubbed_driver import stubbed
from torch import Tensor
with stubbed() as stub:
    launches = all_launches()
    assert len({launch.name for launch in launches}) == 11
    for launch in launches:
        tensors = sum(isinstance(arg, Tensor) for arg in launch.args)
        # An integer that is 1 is compiled into the kernel.
        passed = [at for at, arg in enumerate(launch.args) if type(arg) is not int or arg != 1]
        stub.watch(tensors, len(passed) - tensors)
        got = []
        for run in (launch.by_triton, launch.bound):
            before = stub.launches
            run()
            assert stub.launches == before + 1
            got.append((stub.parameters[: len(passed)], stub.grid))
        assert got[0] == got[1], (launch.name, got)
        assert got[0][0][: tensors] == tuple(arg.data_ptr() for arg in launch.args[:tensors])
        assert launch.kernel._bound
""")


@pytest.mark.deep
def test_what_a_kernel_is_compiled_for_decides_what_is_launched() -> None:
    run("""
import torch
from triton import knobs
from baton_kernels.activation import SILU
from baton_kernels.cuda import rows
from loadtest.stubbed_driver import stubbed
compiled, heard = [], []
knobs.runtime.jit_post_compile_hook = lambda **of_kernel: compiled.append(of_kernel["key"])

def launch(tensor):
    before = stub.launches, len(rows._activated._bound), len(compiled)
    rows.activated(tensor, SILU)
    now = stub.launches, len(rows._activated._bound), len(compiled)
    return tuple(after - earlier for earlier, after in zip(before, now))

with stubbed() as stub:
    wide = torch.zeros(3, 128)
    assert launch(wide) == (1, 1, 1)
    assert launch(wide[:2]) == (1, 0, 0)
    assert launch(wide.bfloat16()) == (1, 1, 1)
    assert launch(torch.zeros(3, 130)) == (1, 1, 1)
    odd = torch.zeros(4 * 128 + 1)[1:].view(4, 128)
    assert launch(odd) == (1, 0, 1)  # triton's: its address is no multiple of 16
    assert launch(odd) == (1, 0, 0)
    assert launch(wide) == (1, 0, 0)
    knobs.runtime.launch_enter_hook.add(lambda metadata: heard.append(metadata))
    launch(wide)
    assert len(heard) == 1
""")
