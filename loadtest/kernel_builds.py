"""Build the Triton kernels for devices that are not there, and read what the assembler says of them.

The kernels' own launching code runs, over tensors in host memory, up to the point where a binary would be
loaded: so what is built is what a device of that kind would be given, down to the alignment of its arguments.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from triton import JITFunction
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.runtime import driver

SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}
"""Bytes that one program can have, by compute capability."""


@dataclass(frozen=True)
class Build:
    """One kernel as a device would load it."""

    kernel: str
    arch: int
    registers: int
    """Of each thread."""
    spilled: int
    """Bytes of registers that each thread keeps in memory, stores and loads together."""
    shared: int
    """Bytes of shared memory."""
    warps: int
    instructions: frozenset[str]
    """Which of the tensor core's instructions are in it."""


@dataclass
class AbsentDevice:
    """Triton's driver, for a device that is not there."""

    arch: int

    def get_current_device(self) -> int:
        return self.arch  # triton keeps what it built by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)


@dataclass
class Builder:
    arch: int
    builds: list[Build] = field(default_factory=list)
    _seen: set[str] = field(default_factory=set)

    def add(self, kernel: Any) -> None:
        if kernel.hash not in self._seen:
            self._seen.add(kernel.hash)
            self.builds.append(assembled(kernel, self.arch))


@contextmanager
def building(arch: int) -> Iterator[Builder]:
    """Within this, a kernel that is launched is built for compute capability ``arch`` and not run."""
    builder = Builder(arch)
    run: Callable[..., Any] = JITFunction.run

    def build(self: object, *args: Any, grid: object, warmup: bool, **kwargs: Any) -> None:
        builder.add(run(self, *args, grid=grid, warmup=True, **kwargs))

    driver.set_active(AbsentDevice(arch))
    try:
        with patch.object(JITFunction, "run", build):
            yield builder
    finally:
        driver._active = None


def assembled(kernel: Any, arch: int) -> Build:
    """``kernel``: what triton has compiled. Its assembler's log is not kept, so it is asked once more."""
    ptx = kernel.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        options = ["-v", "--regAllocOptLevel=2", f"--gpu-name={sm_arch_from_capability(arch)}"]
        command = [get_ptxas(arch).path, *options, str(source), "-o", f"{folder}/kernel.cubin"]
        log = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    registers = re.search(r"Used (\d+) registers", log)
    if spilled is None or registers is None:
        raise RuntimeError(f"ptxas says nothing of registers: {log}")
    return Build(
        kernel=kernel.metadata.name.strip("_"),
        arch=arch,
        registers=int(registers[1]),
        spilled=int(spilled[1]) + int(spilled[2]),
        shared=kernel.metadata.shared,
        warps=kernel.metadata.num_warps,
        instructions=frozenset(re.findall(r"\b(wgmma|mma)\b(?=\.\S*(?:sync|aligned))", ptx)),
    )
