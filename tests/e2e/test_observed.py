"""A ring under load, watched by a real Prometheus with the rules and dashboards that Baton comes with."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.process.ready import RouterReady
from baton.telemetry.vllm import ALIASES, STAGE_ALIASES
from tests.support.chart import MONITORING, of_kind, render
from tests.support.metric_docs import described, exported, vllm_names
from tests.support.planner_process import running_planner
from tests.support.pressure import pressure
from tests.support.prometheus import (
    Server,
    empty_panels,
    has_figures,
    needs_prometheus,
    rules,
    running_prometheus,
    selectors_of_rules,
)
from tests.support.release import free_ports
from tests.support.ring import Ring, Service, running, running_ring

pytestmark = pytest.mark.deep

LOOK_BACK = "6s"
QUIET = {"Pause of a resumed answer", "What asking Redis takes"}
"""Panels that this ring cannot fill: it loses no worker, and has no Redis."""
UNTIL_IT_HAPPENS = {
    'baton_choices_total{finish_reason=~"error|deadline_exceeded"}',
    'baton_requests_total{endpoint=~"/v1/.*|baton.*", status=~"5.."}',
    "baton_admission_refused_total",
    "baton_shared_state_calls_total",
    "baton_task_failures_total",
}
"""What rules look at that is not there while nothing fails and there is no Redis."""

BY_OPERATOR = {"namespace": "serving", "pod": "one", "container": "baton", "endpoint": "metrics"}
"""Labels that Prometheus' operator gives to every target of a monitor. ``endpoint`` is its port, and the name
of a label that metrics have."""


@pytest.fixture(scope="module")
def of_monitors() -> dict[str, Any]:
    """How a Prometheus scrapes what the chart's monitors name."""
    monitors = of_kind(render(apis=[MONITORING]), "PodMonitor").values()
    [relabelings] = {
        json.dumps(endpoint["metricRelabelings"])
        for monitor in monitors
        for endpoint in monitor["spec"]["podMetricsEndpoints"]
    }
    return {"labels": BY_OPERATOR, "metric_relabelings": json.loads(relabelings)}


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    with running_ring(
        tmp_path_factory.mktemp("ring"),
        options=("--vllm-metric-names",),
        decode_options=("--speculative-method", "ngram"),
        router_options=(
            *("--vllm-metric-names", "--slo-ttft", "0.0011", "--slo-itl", "30"),
            *("--limit-requests-per-minute", "1000000"),
        ),
    ) as running:
        with pressure(running.url) as load:
            load.wait(4, 60)
        yield running


def _page(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
        text: str = response.read().decode()
    return text


def _addresses(ring: Ring) -> dict[str, str]:
    """Where metrics are, by role."""
    found = {service.ready.role: service.ready.metrics for service in ring.workers}
    return {"router": ring.url.removeprefix("http://"), **found}  # type: ignore[dict-item]


def test_what_is_exported_is_what_is_documented(ring: Ring) -> None:
    known = {name: each for name, each in described().items() if each.where != {"planner"}}
    seen: dict[str, set[str]] = {name: set() for name in known}
    for role, address in _addresses(ring).items():
        where = "router" if role == "router" else "worker"
        page = exported(_page(address))
        ours = {name: kind for name, kind in page.types.items() if not name.startswith("vllm:")}
        for name, kind in ours.items():
            assert name in known, f"{role} exports {name}, which docs/metrics.md does not have"
            assert known[name].type == kind, name
            assert where in known[name].where, f"docs/metrics.md has {name} elsewhere, not on the {where}"
            labels = page.labels.get(name)
            assert labels is None or labels == known[name].labels, f"{name} has the labels {labels}"
            seen[name].add(where)
    for name, places in seen.items():
        assert places == known[name].where, f"docs/metrics.md has {name}, which only {places} export"


def test_vllm_names_are_those_documented(ring: Ring) -> None:
    aliases = {alias.name: name for name, alias in ALIASES.items()}
    aliases |= {alias.name: "baton_request_stage_seconds" for alias in STAGE_ALIASES.values()}
    assert vllm_names() == aliases
    names = {
        name.removesuffix("_total")
        for address in _addresses(ring).values()
        for name in exported(_page(address)).types
        if name.startswith("vllm:")
    }
    assert names == set(aliases)


def test_stages_account_for_the_first_token(ring: Ring) -> None:
    """The router's stages sum to TTFT, and its workers' are within them."""
    page = _page(_addresses(ring)["router"]).splitlines()
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in page if line[:1] != "#"}
    stages = {name: v for name, v in values.items() if name.startswith("baton_request_stage_seconds_sum")}
    assert len(stages) == 5
    ttft = values['baton_time_to_first_token_seconds_sum{model="demo"}']
    assert sum(stages.values()) == pytest.approx(ttft, rel=1e-6)
    prefill = _page(_addresses(ring)["prefill"]).splitlines()
    at_worker = sum(
        float(line.rpartition(" ")[2])
        for line in prefill
        if line.startswith("baton_request_stage_seconds_sum")
    )
    waited = sum(v for name, v in stages.items() if "prefill" in name)
    assert 0 < at_worker < waited


@needs_prometheus
def test_every_panel_and_rule_has_data_under_load(
    ring: Ring, of_monitors: dict[str, Any], tmp_path: Path
) -> None:
    targets = list(_addresses(ring).values())
    [port] = free_ports(1)
    targets.append(f"127.0.0.1:{port}")
    with (
        running_prometheus(tmp_path, targets, every="500ms", **of_monitors) as server,
        running_planner(tmp_path, ring, server.url, port, 'job="baton"'),
        pressure(ring.url) as load,
    ):
        deadline = time.monotonic() + 40
        while (problems := _problems(server)) and time.monotonic() < deadline:
            time.sleep(0.5)
        assert not problems, "\n".join(problems)
        assert server.targets_up() == len(targets)
        told = server.value("sum(baton_choices_total)")
    assert set(load.statuses) == {200}
    assert told > 0


@needs_prometheus
def test_errors_of_a_router_are_seen_by_the_alert(of_monitors: dict[str, Any], tmp_path: Path) -> None:
    [expression] = [rule["expr"] for rule in rules() if rule.get("alert") == "BatonServerErrors"]
    worker = ("--worker", "127.0.0.1:9")  # that is not there
    argv = ("router", "--model", "demo", "--port", "0", "--grpc-port", "-1", *worker)
    router = Service("router", argv, tmp_path / "router.log")
    with running([router]):
        assert isinstance(router.ready, RouterReady)
        address = router.ready.http
        with running_prometheus(tmp_path, [address], every="500ms", **of_monitors) as server:
            deadline = time.monotonic() + 30
            while not (found := server.query(expression)) and time.monotonic() < deadline:
                assert _asked(address) == 503
                time.sleep(0.2)
            assert server.value(expression) == 1
            assert [each["metric"] for each in found] == [{"namespace": "serving"}]
            assert server.query('baton_requests_total{endpoint="/v1/completions"}')
            assert not server.query('{exported_endpoint!=""}')
            assert server.query('baton_router_tasks{endpoint="metrics"}'), "what has none keeps the port's"


def _asked(address: str) -> int:
    """The status."""
    body = json.dumps({"model": "demo", "prompt": "a", "max_tokens": 1}).encode()
    request = urllib.request.Request(
        f"http://{address}/v1/completions", body, {"Content-Type": "application/json"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            status: int = response.status
    except urllib.error.HTTPError as error:
        status = error.code
    return status


def _problems(server: Server) -> list[str]:
    """What gives nothing and should; empty when all is well."""
    problems = [f"{p}: {e}" for p, e in empty_panels(server, LOOK_BACK) if p.title not in QUIET]
    problems += [
        f"rule: {each}" for each in selectors_of_rules() - UNTIL_IT_HAPPENS if not server.query(each)
    ]
    for rule in rules():
        if "record" in rule and not has_figures(server.query(rule["record"])):
            problems.append(f"nothing is recorded as {rule['record']}")
    return problems + server.broken_rules()
