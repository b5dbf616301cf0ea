"""Writes the tables of docs/from-vllm.md: ``python -m scripts.from_vllm``.

``--check`` writes nothing, and fails where the page differs. What vLLM has is in vllm.json, which listing.py
makes.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from baton.cli.vllm.option import VllmOption
from baton.cli.vllm.refused import EARLIER
from baton.cli.vllm.table import BY_NAME, OPTIONS
from scripts.from_vllm.metrics import SAME, other

PAGE = Path(__file__).parents[2] / "docs/from-vllm.md"
LISTING = Path(__file__).with_name("vllm.json")


@dataclass(frozen=True, slots=True)
class Listed:
    """What a release of vLLM has."""

    version: str
    groups: Mapping[str, tuple[str, ...]]
    """The options' first spellings by the heading of vLLM's help."""
    metrics: tuple[str, ...]


def listed() -> Listed:
    """The listing in the repository."""
    content = json.loads(LISTING.read_text(encoding="utf-8"))
    groups: dict[str, list[str]] = {}
    for option in content["options"]:
        groups.setdefault(option["group"], []).append(option["names"][0])
    return Listed(
        content["vllm"],
        {group: tuple(names) for group, names in groups.items()},
        tuple(content["metrics"]),
    )


def option_tables(listing: Listed) -> str:
    """A table for each group of vLLM's options, and one for those of earlier releases."""
    counts = Counter(option.verdict for option in OPTIONS)
    told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ("same", "taken", "different", "refused"))
    parts = [f"vLLM {listing.version} has {len(OPTIONS)} options: {told}."]
    for group, names in listing.groups.items():
        parts.append(f"### {group}\n\n{_table(BY_NAME[name] for name in names)}")
    parts.append(f"### Of earlier releases\n\n{_table(EARLIER)}")
    return "\n\n".join(parts)


def metric_table(listing: Listed) -> str:
    """A row for each of vLLM's metrics."""
    rows = ["| vLLM | | Baton | |", "|---|---|---|---|"]
    for name in listing.metrics:
        if name in SAME:
            rows.append(f"| `{name}` | same | `{SAME[name]}` | |")
            continue
        found = other(name)
        shown = ", ".join(f"`{each}`" for each in found.baton)
        verdict = "different" if shown else "none"
        rows.append(f"| `{name}` | {verdict} | {shown} | {found.why} |".replace("|  |", "| |"))
    return "\n".join(rows)


def page_with(text: str, listing: Listed) -> str:
    """The page with its tables written anew."""
    for name, table in (("options", option_tables(listing)), ("metrics", metric_table(listing))):
        mark = f"<!-- {name}: written by python -m scripts.from_vllm -->\n"
        end = f"\n<!-- end of {name} -->"
        if mark not in text or end not in text:
            sys.exit(f"{PAGE} has no place for {name}: {mark}{end}")
        before, _, rest = text.partition(mark)
        text = f"{before}{mark}\n{table}\n{end}{rest.partition(end)[2]}"
    return text


def _table(options: Iterable[VllmOption]) -> str:
    rows = ["| vLLM | | Baton | |", "|---|---|---|---|"]
    for option in options:
        names = ", ".join(f"`{name}`" for name in option.names)
        rows.append(
            f"| {names} | {option.verdict} | {_baton(option)} | {option.why} |".replace("|  |", "| |")
        )
    return "\n".join(rows)


def _baton(option: VllmOption) -> str:
    if option.baton:
        return ", ".join(f"`{each}`" for each in option.baton.split(", "))
    if option.choices:
        return ", ".join(f"`{choice}`" for choice in option.choices) + " alone"
    return ""


if __name__ == "__main__":
    before = PAGE.read_text(encoding="utf-8")
    after = page_with(before, listed())
    if "--check" in sys.argv[1:]:
        sys.exit(f"{PAGE} is behind the code: run python -m scripts.from_vllm" if after != before else 0)
    PAGE.write_text(after, encoding="utf-8")
