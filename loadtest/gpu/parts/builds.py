"""All Triton kernels, built at once in many processes, so that later parts find them in Triton's cache.

A process of each core builds every so many launches of ``loadtest.kernels`` for this device's compute
capability, and the C functions that launch them. On a machine without a device one kernel is built, for
compute capability 9.0.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from triton.backends.nvidia.driver import CudaLauncher

from loadtest.gpu.bench import Bench
from loadtest.gpu.results import SkipPartError
from loadtest.kernel_builds import SHARED_MEMORY, building
from loadtest.kernels import Launch, everything, row_launches

MOST_PROCESSES = 16
SPARE_S = 5.0


def measure(bench: Bench) -> None:
    """Start the processes, and write what the assembler says of each kernel."""
    processes = 1 if bench.dry else min(MOST_PROCESSES, os.cpu_count() or 1)
    arch = 90
    if bench.on_cuda:
        major, minor = torch.cuda.get_device_capability(bench.device)
        arch = 10 * major + minor
    began = time.monotonic()
    files = [bench.tmp / f"builds-{number}.json" for number in range(processes)]
    argv = [sys.executable, "-m", __name__, str(arch), str(processes)]
    argv += ["--few"] if bench.dry else ["--launchers"]
    children = [subprocess.Popen([*argv, str(n), str(file)]) for n, file in enumerate(files)]
    failed = [n for n, child in enumerate(children) if child.wait(max(1.0, bench.left - SPARE_S))]
    built: dict[str, list[dict[str, int]]] = {}
    for file in files:
        for name, found in json.loads(file.read_text()) if file.exists() else []:
            built.setdefault(name, []).append(found)
    for name, found in sorted(built.items()):
        worst = {key: max(one[key] for one in found) for key in ("registers", "shared", "spilled")}
        fits = worst["shared"] <= SHARED_MEMORY.get(arch, worst["shared"])
        bench.results.row("Kernels built", kernel=name, variants=len(found), **worst, fits=fits)
    taken = time.monotonic() - began
    count = sum(map(len, built.values()))
    bench.results.row("The build", kernels=count, processes=processes, seconds=taken)
    if failed:
        raise RuntimeError(f"{len(failed)} of {processes} processes failed")
    if not count:
        raise SkipPartError("nothing was built")


def build(arch: int, wanted: Sequence[Launch], file: Path, launchers: bool) -> None:
    """Build the kernels of these launches, and write what the assembler says. ``launchers``: build what
    launches them, too, as triton does when it loads a kernel."""
    with building(arch) as builder:
        for launch in wanted:
            launch.run(arch)
    for kernel in builder.kernels if launchers else ():
        CudaLauncher(kernel.src, kernel.metadata)
    names = ("registers", "shared", "spilled")
    found = [(one.kernel, {name: getattr(one, name) for name in names}) for one in builder.builds]
    file.write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("arch", type=int)
    parser.add_argument("processes", type=int)
    parser.add_argument("number", type=int)
    parser.add_argument("file", type=Path)
    parser.add_argument("--few", action="store_true", help="one kernel")
    parser.add_argument("--launchers", action="store_true", help="what launches the kernels as well")
    args = parser.parse_args()
    wanted = list(row_launches("float32"))[:1] if args.few else everything()
    build(args.arch, wanted[args.number :: args.processes], args.file, args.launchers)


if __name__ == "__main__":
    main()
