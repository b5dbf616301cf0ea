"""Python, and the packages that the services here import."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence

from packaging.requirements import Requirement

from baton.doctor import gpu
from baton.doctor.finding import Finding, missing, note, ok
from baton.doctor.machine import Machine
from baton.doctor.wanted import Wanted

_BASE = ""
"""What every service needs: the requirements without an extra."""
_SHOWN = ("torch", "triton", "numpy", "safetensors", "kubernetes", "grpcio", "fastapi", "uvicorn")
"""The packages whose versions are told."""


def check(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    """The versions that are installed, against those that pyproject.toml asks for."""
    yield ok("Python", platform.python_version())
    requirements = [Requirement(text) for text in machine.requirements()]
    if not requirements:
        yield note("packages", "Baton is not installed as a package here: what it requires is not known")
        return
    for extra, needed in _extras(machine, wanted).items():
        of_extra = [one for one in requirements if _belongs(one, extra)]
        if not needed and all(machine.version(one.name) is None for one in of_extra):
            continue  # nobody misses it
        yield _installed(machine, extra, of_extra, needed=needed)


def _extras(machine: Machine, wanted: Wanted) -> Mapping[str, bool]:
    """The extras that matter to what is to run here, and whether it needs them."""
    extras = {_BASE: True}
    if wanted.computes:
        extras |= {"worker": True, "gpu": gpu.is_wanted(machine, wanted)}
    if wanted.routes:
        extras |= {"kubernetes": False, "otel": False}
    return extras


def _belongs(requirement: Requirement, extra: str) -> bool:
    if requirement.marker is None:
        return extra == _BASE
    alone = requirement.marker.evaluate({"extra": _BASE})
    return alone if extra == _BASE else not alone and requirement.marker.evaluate({"extra": extra})


def _installed(machine: Machine, extra: str, wanted: Sequence[Requirement], *, needed: bool) -> Finding:
    name = f"baton[{extra}]" if extra else "baton"
    found = {one.name: machine.version(one.name) for one in wanted}
    absent = [one.name for one in wanted if found[one.name] is None]
    unfit = [
        f"{one.name} {version} (not {one.specifier})"
        for one in wanted
        if (version := found[one.name]) is not None and not one.specifier.contains(version, prereleases=True)
    ]
    do = f"pip install '{name}' -c constraints.txt"
    if unfit:
        return missing(name, f"unfit: {', '.join(unfit)}", do, needed=needed)
    if absent:
        return missing(name, f"not installed: {', '.join(absent)}", do, needed=needed)
    shown = [f"{package} {found[package]}" for package in _SHOWN if found.get(package)]
    return ok(name, ", ".join(shown) or "installed")
