"""Build the Triton kernels for devices that are absent, and read what the assembler reports of them.

The kernels' own launching code runs, over tensors in host memory, up to the point where a binary would be
loaded: the build is the one that such a device would load, down to the alignment of its arguments.
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

SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Most bytes of shared memory of one program, by compute capability."""


@dataclass(frozen=True)
class Build:
    """A kernel as a device would load it."""

    kernel: str
    arch: int
    registers: int
    """Registers of each thread."""
    spilled: int
    """Register bytes that each thread spills to memory, stores and loads together."""
    shared: int
    """Shared memory, in bytes."""
    warps: int
    instructions: frozenset[str]
    """The tensor core's instructions that the binary contains."""


@dataclass
class AbsentDevice:
    """Triton's driver, for a device that is absent."""

    arch: int

    def get_current_device(self) -> int:
        return self.arch  # triton caches builds by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)


@dataclass
class Builder:
    arch: int
    builds: list[Build] = field(default_factory=list)
    kernels: list[Any] = field(default_factory=list)
    """What triton compiled, in the order of ``builds``."""
    _seen: set[str] = field(default_factory=set)

    def add(self, kernel: Any) -> None:
        if kernel.hash not in self._seen:
            self._seen.add(kernel.hash)
            self.builds.append(assembled(kernel, self.arch))
            self.kernels.append(kernel)


@contextmanager
def building(arch: int) -> Iterator[Builder]:
    """Build each kernel that is launched within this context for compute capability ``arch``, and do not run
    it."""
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
    """Assemble ``kernel``, which triton has compiled, once more, as triton does not keep the assembler's
    log."""
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
        instructions=frozenset(
            re.findall(r"\b(wgmma|mma|tcgen05(?=\.mma))\b(?=\.\S*(?:sync|aligned|kind))", ptx)
        ),
    )
