"""What docs/metrics.md says there is, and what a page of metrics has."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
PARTS = {
    "On the router": frozenset({"router"}),
    "On workers": frozenset({"worker"}),
    "On the planner": frozenset({"planner"}),
}
BOTH = frozenset({"router", "worker"})
HISTOGRAM_SUFFIXES = ("_bucket", "_sum", "_count")


@dataclass(frozen=True, slots=True)
class Described:
    """One metric, as the document has it."""

    type: str
    unit: str
    labels: frozenset[str]
    where: frozenset[str]
    """router, worker or both; or planner."""


def described() -> dict[str, Described]:
    """Every metric of Baton's own names in the tables of the document."""
    found: dict[str, Described] = {}
    where = BOTH
    for line in DOCUMENT.read_text().splitlines():
        if line.startswith("## "):
            where = PARTS.get(line[3:], BOTH)
        match = re.fullmatch(r"\| `(\w+)` \| (counter|gauge|histogram) \| ([^|]+) \| ([^|]*)\|.+\|", line)
        if match:
            name, kind, unit, labels = match.groups()
            assert name not in found, f"{name} is described twice"
            found[name] = Described(kind, unit, frozenset(re.findall(r"`(\w+)`", labels)), where)
    return found


def vllm_names() -> dict[str, str]:
    """vLLM's name → Baton's, without the suffix of counters."""
    return dict(re.findall(r"^\| `(vllm:\w+)` \| `(\w+)`", DOCUMENT.read_text(), re.MULTILINE))


@dataclass(frozen=True, slots=True)
class Exported:
    """A page of metrics."""

    types: dict[str, str]
    labels: dict[str, frozenset[str]]
    """Of those with samples; without a histogram's ``le``."""


def exported(page: str) -> Exported:
    types = dict(re.findall(r"^# TYPE (\S+) (\w+)$", page, re.MULTILINE))
    labels: dict[str, frozenset[str]] = {}
    for name, given in re.findall(r"^([a-zA-Z_:][\w:]*)(\{.*\})? \S+$", page, re.MULTILINE):
        keys = frozenset(re.findall(r'(\w+)="(?:[^"\\]|\\.)*"', given)) - {"le"}
        labels[family(name, types)] = labels.get(family(name, types), frozenset()) | keys
    return Exported(types, labels)


def family(sample: str, known: dict[str, str] | dict[str, Described]) -> str:
    """The metric that a sample's name is of."""
    for suffix in HISTOGRAM_SUFFIXES:
        base = sample.removesuffix(suffix)
        if base != sample and base in known:
            return base
    return sample
