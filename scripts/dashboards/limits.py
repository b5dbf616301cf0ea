"""The values at which alerts fire, read from their rules: panels draw a line there."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import yaml

RULES = Path(__file__).parents[2] / "helm" / "baton" / "rules" / "baton-alerts.yaml"
_ABOVE = re.compile(r"> ([\d.]+)\b")


@cache
def limit_of(alert: str) -> float:
    """Return the value above which an alert fires; ValueError if there is no such alert, or no one value."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    found = [rule["expr"] for group in groups for rule in group["rules"] if rule["alert"] == alert]
    limits = {float(value) for expression in found for value in _ABOVE.findall(expression)}
    if len(limits) != 1:
        raise ValueError(f"{alert}: {len(limits)} values in its rule, and a panel can draw one")
    return limits.pop()
