"""What is measured on and with: versions, the card as it is, and which parts can be imported here."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from loadtest.gpu.bench import Bench
from loadtest.gpu.plan import PARTS

ROOT = Path(__file__).parents[3]
PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "transformers",
    "flashinfer-python",
    "ucxx-cu13",
    "nixl",
    "nixl-cu13",
    "nvidia-nccl-cu13",
    "nvidia-cudnn-cu13",
    "grpcio",
    "protobuf",
)
PROGRAMS = (
    "baton.worker.start",
    "baton.router.main",
    "tests.support.clients",
    "pytest_asyncio",
    "pytest_timeout",
)
"""Modules of the processes that parts start."""
CARD = ("name", "driver_version", "memory.total", "memory.used", "clocks.max.sm", "power.limit", "pstate")


def measure(bench: Bench) -> None:
    """Write the versions, then whether each part can be imported: nothing here fails."""
    for what, found in versions(bench).items():
        bench.results.row("Versions", what=what, **{"is": found})
    modules = dict.fromkeys(f"loadtest.gpu.parts.{part.module}" for part in PARTS)
    for module in (*modules, *PROGRAMS):
        try:
            import_module(module)
            problem = ""
        except Exception as error:  # noqa: BLE001 (whatever it is, that part will show it and others run)
            problem = f"{type(error).__name__}: {error}"
        bench.results.row("Imports", module=module, works=not problem, problem=problem)


def versions(bench: Bench) -> dict[str, str]:
    """Return the device, the software and the machine; what cannot be told here is said to be unknown."""
    name = platform.processor() or platform.machine()
    if bench.on_cuda:
        properties = torch.cuda.get_device_properties(bench.device)
        size = (
            f"{properties.total_memory / 2**30:.1f} GiB, {properties.multi_processor_count} multiprocessors"
        )
        name = f"{properties.name}, {size}, compute capability {properties.major}.{properties.minor}"
    packages = [f"{package} {found}" for package in PACKAGES if (found := version_of(package))]
    commit = output_of(["git", "describe", "--always", "--dirty"]) or packed_commit()
    card = output_of(["nvidia-smi", f"--query-gpu={','.join(CARD)}", "--format=csv,noheader"])
    return {
        "device": name,
        "nvidia-smi": card or "unknown",
        "CUDA": f"{torch.version.cuda}, cuDNN {cudnn() or 'none'}",
        "Baton": commit or "unknown",
        "software": f"Python {platform.python_version()}, {', '.join(packages)}",
        "machine": f"{os.cpu_count()} cores, Linux {platform.release()}, {memory()}",
    }


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def output_of(command: list[str]) -> str:
    """Return what a command prints, in one line; empty if there is no such command or it fails."""
    try:
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ""
    return " ".join(ran.stdout.split()) if ran.returncode == 0 else ""


def packed_commit() -> str:
    """Return the commit that a bundle was packed from; empty if this is no bundle."""
    try:
        return (ROOT / "COMMIT").read_text().strip()
    except OSError:
        return ""


def cudnn() -> int | None:
    version: Callable[[], int | None] = torch.backends.cudnn.version
    return version()


def memory() -> str:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return "memory unknown"
    return f"{total / 2**30:.0f} GiB of memory"
