"""Compiles the kernels for the machine they run on.

    python -m baton_kernels.cpu.build      # builds them now and prints where they are

A library is kept in the cache directory (``BATON_CACHE_DIR``, or ``baton`` in ``XDG_CACHE_HOME`` or
``~/.cache``) under a name derived from its source, compiler and processor, so a change of any of these gets a
library of its own.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("native.cpp")
HEADERS = tuple(sorted(SOURCE.parent.glob("*.h")))
"""The files that the source includes."""
COMPILE_S = 300.0
_TUNE = {"x86_64": "-march=native", "aarch64": "-mcpu=native"}
# -ffast-math only for compiling: linked with it, a library makes the whole process flush denormal numbers.
# The source is one unit, of which the compiler may inline all that is hot, however much of it there is.
_INLINE = "--param=inline-unit-growth=400"
_FLAGS = ("-std=c++17", "-O3", "-ffast-math", "-fopenmp", "-fPIC", _INLINE)


class BuildError(Exception):
    """No library can be built. The message is one line for a person."""


@dataclass(frozen=True, slots=True)
class Build:
    """The compiler and the flags of this machine's library, and the file that the library is kept in."""

    compiler: str
    flags: tuple[str, ...]
    place: Path


def planned() -> Build:
    """How this machine's library is built, whether it exists or not. BuildError without a compiler, and for a
    processor that the kernels are not written for."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise BuildError("no C++ compiler (g++, or another one named by CXX)")
    if platform.machine() not in _TUNE:
        raise BuildError(f"not written for {platform.machine()}")
    flags = (*_FLAGS, _TUNE[platform.machine()], *_slow_instructions())
    return Build(compiler, flags, _cache() / f"cpu-{_key(compiler, flags)}.so")


def library() -> Path:
    """The library for this machine, built if it does not exist. BuildError if no compiler can build it."""
    build = planned()
    place = build.place
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        # Several workers start at once; one worker builds.
        with place.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not place.exists():
                _build(build.compiler, build.flags, place)
    except OSError as error:
        raise BuildError(f"{place.parent} cannot be written: {error}") from error
    return place


def _cache() -> Path:
    if own := os.environ.get("BATON_CACHE_DIR"):
        return Path(own)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "baton"
    try:
        return Path.home() / ".cache" / "baton"
    except RuntimeError as error:  # a user id that has no name and no HOME, as containers may have
        raise BuildError("there is no home directory to keep them in; set BATON_CACHE_DIR") from error


def _key(compiler: str, flags: tuple[str, ...]) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    told = (*(file.read_text() for file in (SOURCE, *HEADERS)), version, *flags, _processor())
    return hashlib.sha256("\0".join(told).encode()).hexdigest()[:20]


def _processor() -> str:
    """The features of the processor: a home directory may be shared by machines that differ."""
    return _cpuinfo("flags", "Features")


def _slow_instructions() -> tuple[str, ...]:
    """Flags for instructions that the processor has and that are slower than their substitutes. Intel's cores
    multiply pairs of bfloat16 at half the rate of floats; AMD's, at twice."""
    return ("-DBATON_SLOW_BF16_PAIRS",) if "GenuineIntel" in _cpuinfo("vendor_id") else ()


def _cpuinfo(*names: str) -> str:
    """The first line that begins with one of ``names``; empty if there is none."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith(names)), "")


def _build(compiler: str, flags: tuple[str, ...], place: Path) -> None:
    built, linked = place.with_suffix(".o"), place.with_suffix(".tmp")
    try:
        _run(compiler, *flags, "-c", str(SOURCE), "-o", str(built))
        _run(compiler, "-shared", "-fopenmp", str(built), "-o", str(linked))
        linked.rename(place)
    finally:
        built.unlink(missing_ok=True)
        linked.unlink(missing_ok=True)


def _run(*command: str) -> None:
    try:
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=COMPILE_S)
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{' '.join(command)} failed: {error.stderr[-2000:]}") from error
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} took more than {COMPILE_S:.0f} s") from error


if __name__ == "__main__":
    print(library())
