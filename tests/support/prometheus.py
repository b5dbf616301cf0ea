"""Debian's Prometheus: its linter, its unit tests of rules, and a server that scrapes what a test runs."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
RULES = sorted((ROOT / "helm" / "baton" / "rules").glob("*.yaml"))
DASHBOARDS = sorted((ROOT / "helm" / "baton" / "dashboards").glob("*.json"))
PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
needs_prometheus = pytest.mark.skipif(
    PROMETHEUS is None or PROMTOOL is None,
    reason="NO prometheus HERE: dashboards and alerts are not tried (apt-get install prometheus)",
)


def promtool(*arguments: str) -> None:
    """AssertionError with what it says if it is not content."""
    assert PROMTOOL is not None
    ended = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, timeout=800)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel of a dashboard, as Grafana would ask for it."""

    dashboard: str
    title: str
    expressions: tuple[str, ...]
    may_be_empty: str
    """Why; empty: it may not."""

    def __str__(self) -> str:
        return f"{self.dashboard} / {self.title}"


def panels(interval: str = "5m") -> list[Panel]:
    """All panels, with Grafana's variables put in: everything, over ``interval``."""
    found: list[Panel] = []
    for path in DASHBOARDS:
        dashboard = json.loads(path.read_text())
        for panel in dashboard["panels"]:
            if panel["type"] == "row":
                continue
            _, _, unless = panel["description"].rpartition("Empty unless ")
            excuse = unless if "Empty unless " in panel["description"] else ""
            expressions = tuple(put_in(target["expr"], interval) for target in panel["targets"])
            found.append(Panel(dashboard["title"], panel["title"], expressions, excuse))
    return found


def put_in(expression: str, interval: str) -> str:
    """An expression without Grafana's variables."""
    for variable, value in (("__rate_interval", interval), ("namespace", ".*"), ("model", ".*")):
        expression = expression.replace(f"${variable}", value)
    return expression


def rules() -> list[dict[str, str]]:
    """Every recording and alerting rule."""
    return [
        rule
        for path in RULES
        for group in yaml.safe_load(path.read_text())["groups"]
        for rule in group["rules"]
    ]


class Server:
    """A running Prometheus."""

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expression: str) -> list[dict[str, object]]:
        """The vector that it is now; ValueError if it is none."""
        query = urllib.parse.urlencode({"query": expression})
        try:
            answer = self._get(f"/api/v1/query?{query}")
        except urllib.error.HTTPError as error:
            raise ValueError(f"{expression}: {error.read().decode()}") from None
        found = answer["data"]["result"]
        assert isinstance(found, list)
        return found

    def value(self, expression: str) -> float:
        """Of the only series."""
        [series] = self.query(expression)
        return float(series["value"][1])

    def targets_up(self) -> int:
        return len(self.query("up == 1"))

    def broken_rules(self) -> list[str]:
        """Those whose evaluation fails."""
        answer = self._get("/api/v1/rules")
        groups = answer["data"]["groups"]
        return [
            f"{rule['name']}: {rule.get('lastError')}"
            for group in groups
            for rule in group["rules"]
            if rule["health"] == "err"
        ]

    def _get(self, path: str) -> dict[str, object]:
        with urllib.request.urlopen(self.url + path, timeout=10) as response:
            document = json.load(response)
        assert isinstance(document, dict)
        return document


def as_configured(relabelings: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Relabelings of a monitor as the operator writes them into Prometheus' configuration."""
    names = {"sourceLabels": "source_labels", "targetLabel": "target_label"}
    return [{names.get(name, name): value for name, value in each.items()} for each in relabelings]


@contextmanager
def running_prometheus(
    tmp: Path,
    targets: Sequence[str],
    *,
    every: str = "1s",
    labels: Mapping[str, str] | None = None,
    metric_relabelings: Sequence[Mapping[str, object]] = (),
) -> Iterator[Server]:
    """A server that scrapes ``targets`` and evaluates the rules that Baton comes with.
    ``metric_relabelings``: as monitors have them."""
    assert PROMETHEUS is not None
    scraped = {
        "job_name": "baton",
        "static_configs": [{"targets": list(targets), "labels": dict(labels or {})}],
        "metric_relabel_configs": as_configured(metric_relabelings),
    }
    config = {
        "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
        "rule_files": [str(path) for path in RULES],
        "scrape_configs": [scraped],
    }
    path = tmp / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    promtool("check", "config", str(path))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    command = [PROMETHEUS, f"--config.file={path}", f"--storage.tsdb.path={tmp / 'data'}"]
    with (tmp / "prometheus.log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
    try:
        _wait_ready(f"http://{address}/-/ready")
        yield Server(f"http://{address}")
    finally:
        process.terminate()
        process.wait(60)


def _wait_ready(url: str) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            time.sleep(0.1)
    raise TimeoutError("Prometheus did not start")


def has_figures(series: Sequence[dict[str, object]]) -> bool:
    """Whether there is anything to draw: NaN, as of a quantile of nothing, is not."""
    return any(str(each["value"][1]) != "NaN" for each in series)


def empty_panels(server: Server, interval: str) -> list[tuple[Panel, str]]:
    """Panels with an expression that gives nothing now, each with the first such expression."""
    empty: list[tuple[Panel, str]] = []
    for panel in panels(interval):
        for expression in panel.expressions:
            if not has_figures(server.query(expression)):
                empty.append((panel, expression))
                break
    return empty


def selectors_of_rules() -> set[str]:
    """What rules look at. An alert that is quiet gives nothing, and must not be quiet for want of data."""
    pattern = re.compile(r"\b(?:(?:baton|process)_\w+|baton:\w+(?::\w+)*|up)\b(?:\{[^}]*\})?")
    found: set[str] = set()
    for rule in rules():
        bare = re.sub(r"\b(?:by|on|without|ignoring)\s*\([^)]*\)", "", rule["expr"])
        found |= set(pattern.findall(bare))
    return found
