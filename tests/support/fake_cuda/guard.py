"""The current device of each thread, as torch's C++ code knows it.

Torch built for a CPU refuses every tensor of a CUDA device, as it has nobody to ask for the current device.
``guard.cpp`` is who it asks; it is compiled when the first fake device of a process is made.
"""

from __future__ import annotations

import ctypes
import subprocess
import sysconfig
import tempfile
from functools import lru_cache
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("guard.cpp")


@lru_cache(maxsize=1)
def load() -> ctypes.CDLL:
    """The compiled guard. CalledProcessError if the compiler refuses it."""
    torch_dir = Path(torch.__file__).parent
    compiler = sysconfig.get_config_var("CXX").split()[0]
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "guard.so"
        flags = ["-std=c++20", "-O1", "-fPIC", "-shared", f"-I{torch_dir / 'include'}"]
        link = [f"-L{torch_dir / 'lib'}", "-lc10"]
        subprocess.run([compiler, *flags, str(SOURCE), "-o", str(built), *link], check=True)
        return ctypes.CDLL(str(built))


def install(devices: int) -> None:
    """Let torch know of ``devices`` CUDA devices; 0: of none."""
    load().fake_cuda_install(devices)


def current_device() -> int:
    """The calling thread's device."""
    return int(load().fake_cuda_get_device())


def set_device(index: int) -> None:
    load().fake_cuda_set_device(index)
