"""The reference of alerts, from the rule files of the chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from scripts.reference.markdown import code, plain, table
from scripts.site.pages import ROOT

RULES = ROOT / "helm/baton/rules"
RUNBOOKS = "docs/"
HEAD = """\
# Alerts

Every alert of `helm/baton/rules`, with its runbook. `critical` wakes somebody: clients get errors or wait.
`warning` is for the day.
"""

Rule = Mapping[str, Any]


def page() -> str:
    """Return the page: a section for each group of alerts."""
    parts = [HEAD]
    for name, alerts in groups().items():
        rows = (
            (
                f"[{alert['alert']}](../{alert['annotations']['runbook_url'].removeprefix(RUNBOOKS)})",
                alert["labels"]["severity"],
                code(str(alert.get("for", "0s"))),
                plain(alert["annotations"]["description"]),
                code(" ".join(alert["expr"].split())),
            )
            for alert in alerts
        )
        parts.append(f"## {name}\n\n" + table(("alert", "severity", "after", "meaning", "expression"), rows))
    return "\n".join(parts).rstrip() + "\n"


def groups() -> Mapping[str, Sequence[Rule]]:
    """Return the alerts of each group that has any."""
    found: dict[str, list[Rule]] = {}
    for file in sorted(RULES.glob("*.yaml")):
        for group in yaml.safe_load(file.read_text(encoding="utf-8"))["groups"]:
            alerts = [rule for rule in group["rules"] if "alert" in rule]
            if alerts:
                found[group["name"]] = alerts
    return found
