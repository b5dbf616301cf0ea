"""The processor, and the compiler that builds kernels for it."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Iterator
from pathlib import Path

from baton.doctor import cgroup, gpu
from baton.doctor.finding import Finding, missing, note, ok
from baton.doctor.machine import Machine
from baton.doctor.wanted import Wanted
from baton_kernels.cpu.build import COMPILE_S, Build, BuildError, planned

_TRIAL = '#include <omp.h>\nextern "C" int baton_trial() { return omp_get_max_threads(); }\n'
_INSTALL = (
    "install g++ (apt-get install g++, or dnf install gcc-c++), name another compiler by CXX, or say "
    "BATON_CPU_KERNELS=plain if plain torch is meant to compute, several times slower"
)


def check(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    """The compiler, what the processor can do, its cores, and where its memory is."""
    if wanted.computes:
        yield _compiler(machine, wanted)
        if gpu.is_wanted(machine, wanted):
            yield _c_compiler(machine)
        yield _features(machine)
    yield _cores(machine)
    if wanted.computes:
        yield _numa(machine)


def _compiler(machine: Machine, wanted: Wanted) -> Finding:
    name = "compiler"
    if os.environ.get("BATON_CPU_KERNELS") == "plain":
        return note(name, "not needed: BATON_CPU_KERNELS=plain has plain torch compute on CPUs")
    needed = not gpu.is_wanted(machine, wanted)
    try:
        build = planned()
    except (BuildError, OSError) as error:
        return missing(name, str(error), _INSTALL, needed=needed)
    if build.place.exists():
        return ok(name, f"{build.compiler}; the CPU kernels are built: {build.place}")
    if failure := _trial(machine, build):
        return missing(
            name, f"{build.compiler} cannot build the CPU kernels: {failure}", _INSTALL, needed=needed
        )
    if failure := _unwritable(build.place.parent):
        do = f"make {build.place.parent} writable, or name another folder by BATON_CACHE_DIR"
        return missing(
            name, f"{build.compiler}, but the CPU kernels have no place: {failure}", do, needed=needed
        )
    return ok(name, f"{build.compiler}; the first worker builds the CPU kernels, which takes minutes")


def _trial(machine: Machine, build: Build) -> str:
    """Why a few lines do not compile with the flags of the kernels; empty: they do."""
    with tempfile.TemporaryDirectory(prefix="baton-doctor-") as folder:
        source = Path(folder, "trial.cpp")
        source.write_text(_TRIAL)
        command = (build.compiler, *build.flags, "-shared", str(source), "-o", str(source.with_suffix(".so")))
        ran = machine.run(command, COMPILE_S)
    return "" if ran.status == 0 else ran.last_words


def _unwritable(folder: Path) -> str:
    """Why no file can be made in ``folder``; empty: one can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return f"{folder}: {error.strerror}"


def _c_compiler(machine: Machine) -> Finding:
    found = os.environ.get("CC") or next(filter(machine.which, ("gcc", "clang")), "")
    if found and machine.which(found):
        return ok("C compiler", f"{found}, with which Triton builds the launchers of its kernels")
    do = "install gcc, or name a C compiler by CC"
    return missing("C compiler", "none: Triton cannot build the kernels of the GPU", do, needed=True)


def _features(machine: Machine) -> Finding:
    kind, name = platform.machine(), "CPU features"
    if kind == "aarch64":
        return ok(name, "aarch64: the kernels compute with 4 floats at a time (NEON)")
    flags = _cpuinfo(machine, "flags").split()
    has = [shown for flag, shown in _SHOWN.items() if flag in flags]
    model = _cpuinfo(machine, "model name") or kind
    if "avx512f" in flags:
        slow = "avx512_bf16" not in flags or "GenuineIntel" in _cpuinfo(machine, "vendor_id")
        how = "bfloat16 as floats" if slow else "bfloat16 in pairs"
        return ok(name, f"{model}: {', '.join(has)}; the kernels compute with 16 floats at a time, {how}")
    if "avx2" in flags:
        return ok(name, f"{model}: {', '.join(has)}; the kernels compute with 8 floats at a time")
    do = "use a processor, or a type of virtual machine, that has AVX2 or AVX-512"
    return note(
        name, f"{model}: neither AVX2 nor AVX-512, so that the kernels compute several times slower", do
    )


_SHOWN = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512_bf16": "AVX-512 BF16", "amx_bf16": "AMX BF16"}
"""The flags of /proc/cpuinfo that are told, and what they are called."""


def _cpuinfo(machine: Machine, name: str) -> str:
    """What the first line of a name says in /proc/cpuinfo; empty if there is none."""
    for line in machine.read("/proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _cores(machine: Machine) -> Finding:
    cores, quota = machine.cores(), cgroup.cpu_quota(machine)
    if quota is None or quota >= cores:
        return ok("cores", f"{cores}" + ("" if quota is None else f", with time for {quota:g}"))
    threads = max(1, int(quota))
    return note(
        "cores",
        f"{cores} to be seen, but time for {quota:g}: workers take one thread for each they see, and wait "
        "for their time",
        f"give each worker its share: --threads (in the chart options.threads), {threads} for one worker",
    )


def _numa(machine: Machine) -> Finding:
    nodes = sorted(machine.path("/sys/devices/system/node").glob("node[0-9]*"))
    if len(nodes) < 2:
        return ok("NUMA", "one node")
    cpus = ", ".join(f"{node.name[4:]}: {(node / 'cpulist').read_text().strip()}" for node in nodes)
    if machine.read("/proc/sys/kernel/numa_balancing").strip() in ("", "0"):
        return ok("NUMA", f"{len(nodes)} nodes (cores {cpus}); pages stay where they are")
    return note(
        "NUMA",
        f"{len(nodes)} nodes (cores {cpus}), and the kernel moves pages between them, which stalls steps",
        "sysctl kernel.numa_balancing=0, and bind each worker of CPUs to a node: numactl -N 0 -m 0 baton …",
    )
