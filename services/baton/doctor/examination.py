"""All checks, and the report of what they found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from types import MappingProxyType

import baton
from baton.doctor import clock, cpu, gpu, hub, limits, memory, network, packages, transports
from baton.doctor.finding import Finding, Judgement, lack
from baton.doctor.machine import Machine
from baton.doctor.wanted import Wanted

KIND, VERSION = "baton doctor", 1

Check = Callable[[Machine, Wanted], Iterable[Finding]]


@dataclass(frozen=True, slots=True)
class Area:
    """A heading of the report."""

    check: Check
    of_workers: bool = False
    """Whether it matters only where workers are to run."""


AREAS: Mapping[str, Area] = MappingProxyType(
    {
        "packages": Area(packages.check),
        "cpu": Area(cpu.check),
        "memory": Area(memory.check),
        "limits": Area(limits.check),
        "gpu": Area(gpu.check, of_workers=True),
        "transports": Area(transports.check, of_workers=True),
        "network": Area(network.check),
        "hub": Area(hub.check),
        "clock": Area(clock.check),
    }
)
"""The areas by name, in the order of the report."""


@dataclass(frozen=True, slots=True)
class Examination:
    """What was found, by area."""

    wanted: Wanted
    findings: Mapping[str, tuple[Finding, ...]]

    def count(self, verdict: Judgement) -> int:
        return sum(one.verdict is verdict for found in self.findings.values() for one in found)

    def document(self) -> dict[str, object]:
        """The report as docs/operations.md describes it."""
        return {
            "kind": KIND,
            "version": VERSION,
            "baton": baton.__version__,
            "role": self.wanted.role,
            "lacks": self.count(Judgement.LACK),
            "notes": self.count(Judgement.NOTE),
            "findings": [
                {"area": area, **asdict(one)} for area, found in self.findings.items() for one in found
            ],
        }


def examine(machine: Machine, wanted: Wanted, areas: Mapping[str, Area] = AREAS) -> Examination:
    """Look at all that matters to what is ``wanted``. All areas at a time: some wait for answers."""
    asked = {name: area for name, area in areas.items() if wanted.computes or not area.of_workers}
    with ThreadPoolExecutor(len(asked)) as pool:
        found = dict(
            zip(asked, pool.map(lambda area: _found(area, machine, wanted), asked.values()), strict=True)
        )
    return Examination(wanted, found)


def _found(area: Area, machine: Machine, wanted: Wanted) -> tuple[Finding, ...]:
    try:
        return tuple(area.check(machine, wanted))
    except (OSError, ValueError, LookupError) as error:
        do = "say so in an issue, with this line and `baton doctor --json`"
        return (lack("examination", f"cannot be made: {type(error).__name__}: {error}", do),)
