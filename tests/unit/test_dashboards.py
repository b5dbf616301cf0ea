"""Dashboards and rules without a ring: they are current, whole, parse, and ask for what is documented."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.dashboards.limits import limit_of
from tests.support.metric_docs import described, family
from tests.support.prometheus import (
    DASHBOARDS,
    ROOT,
    RULES,
    needs_prometheus,
    panels,
    promtool,
    put_in,
    rules,
)

KNOWN = described()
ADDED = {"instance", "namespace", "job", "pod", "le"}
"""Labels that Prometheus gives."""
UNITS = {"s", "reqps", "ops", "short", "percentunit", "Bps", "bytes", "none"}
_NAME = re.compile(r"\b(?:baton_\w+|process_\w+)")
_GROUPING = re.compile(r"\b(?:by|on)\s*\(([^)]*)\)")
_SELECTOR = re.compile(r"\b((?:baton|process)_\w+)\{([^}]*)\}")


@pytest.fixture(params=DASHBOARDS, ids=lambda path: path.stem)
def dashboard(request: pytest.FixtureRequest) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(request.param.read_text())
    return document


def test_files_are_what_the_generator_writes() -> None:
    subprocess.run([sys.executable, "-m", "scripts.dashboards", "--check"], check=True, cwd=ROOT)


def test_there_is_a_dashboard_for_each_thing() -> None:
    names = {path.stem for path in DASHBOARDS}
    things = ("overview", "first-token", "prefill", "decode", "handoff", "cache", "router", "planner")
    assert names == {f"baton-{thing}" for thing in things}


def test_identities_are_unique(dashboard: dict[str, Any]) -> None:
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    titles = [panel["title"] for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len(set(titles)) == len(titles)
    uids = [json.loads(path.read_text())["uid"] for path in DASHBOARDS]
    assert len(set(uids)) == len(uids)


def test_panels_do_not_overlap(dashboard: dict[str, Any]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


def test_each_panel_has_a_unit_a_source_and_queries(dashboard: dict[str, Any]) -> None:
    assert [v["name"] for v in dashboard["templating"]["list"]] == ["datasource", "namespace", "model"]
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            continue
        unit = panel["fieldConfig"]["defaults"]["unit"]
        assert unit in UNITS or unit.startswith("suffix: "), panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["targets"], panel["title"]
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"
            assert target["legendFormat"]
            if "[" in target["expr"]:
                assert "[$__rate_interval]" in target["expr"], "rates go by the scrape interval"


def test_lines_are_drawn_where_alerts_fire(dashboard: dict[str, Any]) -> None:
    fires = {rule["alert"]: rule["expr"] for rule in rules() if "alert" in rule}
    for panel in dashboard["panels"]:
        named = re.search(r"The dashed line: (\w+)\.", panel.get("description", ""))
        defaults = panel.get("fieldConfig", {}).get("defaults", {})
        assert ("thresholds" in defaults) == bool(named), panel["title"]
        if named:
            *_, step = defaults["thresholds"]["steps"]
            assert re.search(rf"> {step['value']:g}\b", fires[named[1]]), panel["title"]
            assert defaults["custom"]["thresholdsStyle"] == {"mode": "dashed"}


def test_an_alert_without_a_value_has_no_line() -> None:
    assert limit_of("BatonKvFull") == 0.95
    for alert in ("BatonIsNoAlert", "BatonNoRouter"):
        with pytest.raises(ValueError, match=alert):
            limit_of(alert)


def test_processes_of_a_router_are_told_apart() -> None:
    found = 0
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                if re.search(r"\bprocess_\w+\{", target["expr"]) and "sum" not in target["expr"]:
                    assert "{{process}}" in target["legendFormat"], panel["title"]
                    found += 1
    assert found


def _expressions() -> list[tuple[str, str]]:
    asked = [(str(panel), expression) for panel in panels() for expression in panel.expressions]
    return asked + [(rule.get("alert") or rule["record"], rule["expr"]) for rule in rules()]


def test_every_metric_asked_for_is_documented_with_its_labels() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    asked = _expressions()
    assert len(asked) > 150
    for where, expression in asked:
        for name in _NAME.findall(expression):
            assert family(name, KNOWN) in KNOWN, f"{where}: {name}"
        for name, matchers in _SELECTOR.findall(expression):
            labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
            allowed = KNOWN[family(name, KNOWN)].labels | ADDED
            assert labels <= allowed, f"{where}: {name} has no {labels - allowed}"
        named = _NAME.findall(expression)
        if named and "baton:" not in expression:
            theirs = set().union(*(KNOWN[family(name, KNOWN)].labels for name in named)) | ADDED
            grouped = {label for by in _GROUPING.findall(expression) for label in re.split(r",\s*", by)}
            assert grouped <= theirs, f"{where}: nothing has {grouped - theirs}"
        for name in re.findall(r"\bbaton:\w+(?::\w+)*", expression):
            assert name in recorded, f"{where}: {name}"


@needs_prometheus
def test_every_expression_parses(tmp_path: Path) -> None:
    asked = [{"record": f"panel:{i}", "expr": e} for i, (_, e) in enumerate(_expressions())]
    path = tmp_path / "panels.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": asked}]}))
    promtool("check", "rules", str(path))
    promtool("check", "rules", *map(str, RULES))


def test_variables_are_put_in() -> None:
    asked = 'rate(a{namespace=~"$namespace", model=~"$model"}[$__rate_interval])'
    assert put_in(asked, "1m") == 'rate(a{namespace=~".*", model=~".*"}[1m])'
    assert not any("$" in expression for panel in panels() for expression in panel.expressions)


def test_each_alert_says_how_bad_it_is_and_has_a_runbook() -> None:
    books = {f"docs/runbooks/{path.name}": path.read_text() for path in (ROOT / "docs/runbooks").iterdir()}
    sections = {
        f"{book}#{name.lower()}": text
        for book, page in books.items()
        for name, text in re.findall(r"^## (\w+)\n(.+?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    }
    alerts = [rule for rule in rules() if "alert" in rule]
    names = [rule["alert"] for rule in alerts]
    assert len(set(names)) == len(names)
    for rule in alerts:
        annotations: Any = rule["annotations"]
        labels: Any = rule["labels"]
        assert labels["severity"] in ("critical", "warning")
        assert annotations["summary"], annotations["description"]
        assert annotations["runbook_url"].endswith(f"#{rule['alert'].lower()}")
        section = sections.pop(annotations["runbook_url"])
        for part in ("Means.", "Look", "do"):
            assert re.search(rf"\*\*{part}\*\*", section, re.IGNORECASE), (rule["alert"], part)
    assert not sections, "runbooks of no alert"
