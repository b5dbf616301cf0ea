"""Each alert fires on what it is for, and none on a ring that is well. Prometheus's own evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import yaml

from tests.support.prometheus import RULES, needs_prometheus, promtool, rules

pytestmark = needs_prometheus

WELL: Mapping[str, str] = {
    'up{instance="r"}': "1+0x130",
    'up{instance="p"}': "1+0x130",
    'up{instance="d"}': "1+0x130",
    'baton_info{instance="r", role="router", model="m", revision="1"}': "1+0x130",
    'baton_info{instance="p", role="prefill", model="m", revision="1"}': "1+0x130",
    'baton_info{instance="d", role="decode", model="m", revision="1"}': "1+0x130",
    'baton_worker_ready{instance="r", worker="p", role="prefill", model="m"}': "1+0x130",
    'baton_worker_ready{instance="r", worker="d", role="decode", model="m"}': "1+0x130",
    'baton_worker_ejected{instance="r", worker="d", role="decode", model="m"}': "0+0x130",
    'baton_worker_draining{instance="r", worker="d", role="decode", model="m"}': "0+0x130",
    'baton_worker_refused{instance="r", worker="d", role="decode", model="m"}': "0+0x130",
    'baton_router_event_loop_longest_turn_seconds{instance="r"}': "0.02+0x130",
    'baton_discovery_staleness_seconds{instance="r", model="m"}': "1+0x130",
    'baton_choices_total{instance="r", model="m", finish_reason="length"}': "0+600x130",
    'baton_requests_total{instance="r", endpoint="/v1/completions", status="200"}': "0+600x130",
    'baton_requests_total{instance="r", endpoint="/health", status="503"}': "0+600x130",  # by design
    'baton_requests_given_up_total{instance="r", reason="worker_lost"}': "0+0x130",
    'baton_requests_given_up_total{instance="r", reason="poison_request"}': "0+0x130",
    'baton_attempts_total{instance="r"}': "0+600x130",
    'baton_resumes_total{instance="r", cause="worker_lost"}': "0+1x130",
    'baton_slo_requests_total{instance="r", model="m", missed="none", cause=""}': "0+600x130",
    'baton_time_to_first_token_seconds_bucket{instance="r", model="m", le="0.5"}': "0+600x130",
    'baton_time_to_first_token_seconds_bucket{instance="r", model="m", le="30"}': "0+600x130",
    'baton_time_to_first_token_seconds_bucket{instance="r", model="m", le="+Inf"}': "0+600x130",
    'baton_inter_token_latency_seconds_bucket{instance="r", model="m", le="0.05"}': "0+9000x130",
    'baton_inter_token_latency_seconds_bucket{instance="r", model="m", le="2.5"}': "0+9000x130",
    'baton_inter_token_latency_seconds_bucket{instance="r", model="m", le="+Inf"}': "0+9000x130",
    'baton_prefill_backlog_seconds{instance="p", role="prefill"}': "0.2+0x130",
    'baton_kv_blocks{instance="d", role="decode", state="held"}': "50+0x130",
    'baton_kv_blocks{instance="d", role="decode", state="free"}': "50+0x130",
    'baton_preemptions_total{instance="d", role="decode"}': "0+0x130",
    'process_cpu_seconds_total{instance="r"}': "0+30x130",
    'process_open_fds{instance="r"}': "100+0x130",
    'process_max_fds{instance="r"}': "1000+0x130",
    'baton_handoffs_completed_total{instance="p", role="prefill"}': "0+600x130",
    'baton_handoffs_completed_total{instance="d", role="decode"}': "0+600x130",
    'baton_handoffs_aborted_total{instance="d", role="decode", reason="link_lost"}': "0+1x130",
    'baton_handoff_oldest_hold_seconds{instance="p", role="prefill"}': "0.1+0x130",
    'baton_handoff_fences_total{instance="d", role="decode"}': "0+0x130",
    'baton_audit_lines_lost_total{instance="r"}': "0+0x130",
    'baton_task_failures_total{instance="r", task="keys"}': "1+0x130",
    'baton_shared_state_up{instance="r"}': "0+0x130",  # no Redis, and no calls of it
    'baton_planner_decisions_total{instance="l", result="unchanged"}': "0+4x130",
    'baton_planner_decisions_total{instance="l", result="held"}': "0+0x130",
    'baton_planner_attainable{instance="l"}': "1+0x130",
}
"""Two hours and ten minutes, a sample each minute: ten requests a second, half a core, half of the memory."""

ILL: Mapping[str, Mapping[str, str | None]] = {
    "BatonTargetDown": {
        'up{instance="d"}': "1+0x100 0+0x30",
        'baton_info{instance="d", role="decode", model="m", revision="1"}': "1+0x100 _x30",
    },
    "BatonNoRouter": {'baton_info{instance="r", role="router", model="m", revision="1"}': None},
    "BatonNoWorkerReady": {
        'baton_worker_ready{instance="r", worker="d", role="decode", model="m"}': "1+0x100 _x30",
        'baton_worker_ready{instance="r", worker="d", role="unknown", model="m"}': "_x101 1+0x30",
    },
    "BatonNoPrefillReady": {
        'baton_worker_ready{instance="r", worker="p", role="prefill", model="m"}': "1+0x100 _x30",
    },
    "BatonWorkerUnreachable": {
        'baton_worker_ready{instance="r", worker="x", role="decode", model="m"}': "1+0x100 _x30",
        'baton_worker_ready{instance="r", worker="x", role="unknown", model="m"}': "_x101 0+0x30",
    },
    "BatonWorkerEjected": {
        'baton_worker_ejected{instance="r", worker="d", role="decode", model="m"}': "1+0x130"
    },
    "BatonWorkerRefused": {
        'baton_worker_refused{instance="r", worker="x", role="unknown", model="m"}': "1+0x130"
    },
    "BatonRouterTurnsLong": {
        'baton_router_event_loop_longest_turn_seconds{instance="r", process="1"}': "0.8+0x130"
    },
    "BatonDiscoveryStale": {'baton_discovery_staleness_seconds{instance="r", model="m"}': "0+60x130"},
    "BatonAnswersFail": {'baton_choices_total{instance="r", model="m", finish_reason="error"}': "0+60x130"},
    "BatonServerErrors": {
        'baton_requests_total{instance="r", endpoint="/v1/completions", status="503"}': "0+60x130"
    },
    "BatonRequestsGivenUp": {'baton_requests_given_up_total{instance="r", reason="worker_lost"}': "0+1x130"},
    "BatonPoisonRequest": {
        'baton_requests_given_up_total{instance="r", reason="poison_request"}': "0x110 1x20"
    },
    "BatonAttemptsLost": {'baton_resumes_total{instance="r", cause="worker_lost"}': "0+60x130"},
    "BatonGoodputBurnsFast": {
        'baton_slo_requests_total{instance="r", model="m", missed="ttft", cause="prefill"}': "0+200x130",
    },
    "BatonGoodputBurnsSlowly": {
        'baton_slo_requests_total{instance="r", model="m", missed="itl", cause="decode"}': "0+50x130",
    },
    "BatonFirstTokenSlow": {
        'baton_time_to_first_token_seconds_bucket{instance="r", model="m", le="0.5"}': "0+500x130",
    },
    "BatonTokensSlow": {
        'baton_inter_token_latency_seconds_bucket{instance="r", model="m", le="0.05"}': "0+8000x130",
    },
    "BatonRequestsRefused": {
        'baton_admission_refused_total{instance="r", tenant="t", reason="overall"}': "0+60x130"
    },
    "BatonPrefillBacklog": {'baton_prefill_backlog_seconds{instance="p", role="prefill"}': "8+0x130"},
    "BatonKvFull": {'baton_kv_blocks{instance="d", role="decode", state="free"}': "1+0x130"},
    "BatonPreemptions": {'baton_preemptions_total{instance="d", role="decode"}': "0+30x130"},
    "BatonRouterBusy": {'process_cpu_seconds_total{instance="r"}': "0+58x130"},
    "BatonFilesRunOut": {'process_open_fds{instance="r"}': "900+0x130"},
    "BatonHandoffsBreak": {
        'baton_handoffs_aborted_total{instance="d", role="decode", reason="link_lost"}': "0+60x130",
    },
    "BatonHandoffStuck": {'baton_handoff_oldest_hold_seconds{instance="p", role="prefill"}': "200+60x130"},
    "BatonLinksFenced": {'baton_handoff_fences_total{instance="d", role="decode"}': "0+1x130"},
    "BatonSharedStateDown": {
        'baton_shared_state_calls_total{instance="r", call="admit", result="timeout"}': "9+1x130"
    },
    "BatonAuditLinesLost": {'baton_audit_lines_lost_total{instance="r"}': "0+1x130"},
    "BatonTaskFails": {'baton_task_failures_total{instance="r", task="keys"}': "1+1x130"},
    "BatonDrainsLong": {
        'baton_worker_ready{instance="r", worker="x", role="decode", model="m"}': "1+0x130",
        'baton_worker_draining{instance="r", worker="x", role="decode", model="m"}': "1+0x130",
    },
    "BatonPlannerHolds": {
        'baton_planner_decisions_total{instance="l", result="unchanged"}': "0+4x100 400+0x30",
        'baton_planner_decisions_total{instance="l", result="held"}': "0+0x100 0+4x30",
    },
    "BatonPlannerCannot": {'baton_planner_attainable{instance="l"}': "0+0x130"},
    "BatonRevisionsMixed": {'baton_info{instance="q", role="decode", model="m", revision="2"}': "1+0x130"},
}
"""Alert → what is different then; None: not there."""
ALSO = {
    "BatonNoRouter": {"BatonRouterBusy"},
    "BatonGoodputBurnsFast": {"BatonGoodputBurnsSlowly"},
}
"""What may fire with an alert by right."""


def _series(changed: Mapping[str, str | None]) -> list[dict[str, str]]:
    together = {**WELL, **changed}
    return [{"series": name, "values": values} for name, values in together.items() if values is not None]


def _evaluate(tmp: Path, cases: Sequence[tuple[Mapping[str, str | None], Mapping[str, bool]]]) -> None:
    """Each case: what is different, and which alerts fire or do not after two hours and more."""
    tests = [
        {
            "interval": "1m",
            "input_series": _series(changed),
            "promql_expr_test": [
                {
                    "expr": f'count(ALERTS{{alertname="{name}", alertstate="firing"}})',
                    "eval_time": "130m",
                    "exp_samples": [{"labels": "{}", "value": 1}] if fires else [],
                }
                for name, fires in expected.items()
            ],
        }
        for changed, expected in cases
    ]
    path = tmp / "alerts_test.yaml"
    document = {"rule_files": [str(path) for path in RULES], "evaluation_interval": "1m", "tests": tests}
    path.write_text(yaml.safe_dump(document))
    promtool("test", "rules", str(path))


ALERTS = [rule["alert"] for rule in rules() if "alert" in rule]


def test_each_alert_is_tried() -> None:
    assert set(ILL) == set(ALERTS)


def test_none_fires_on_a_ring_that_is_well(tmp_path: Path) -> None:
    _evaluate(tmp_path, [({}, dict.fromkeys(ALERTS, False))])


@pytest.mark.deep
def test_each_fires_on_what_it_is_for_and_alone(tmp_path: Path) -> None:
    cases = []
    for name, changed in ILL.items():
        others = [other for other in ALERTS if other != name and other not in ALSO.get(name, ())]
        cases.append((changed, {name: True, **dict.fromkeys(others, False)}))
    _evaluate(tmp_path, cases)


@pytest.mark.deep
def test_who_drains_takes_nothing_new(tmp_path: Path) -> None:
    decode, prefill = "BatonNoWorkerReady", "BatonNoPrefillReady"
    cases = []
    for worker, role, fires in (("d", "decode", decode), ("p", "prefill", prefill)):
        drains = f'baton_worker_draining{{instance="r", worker="{worker}", role="{role}", model="m"}}'
        cases.append(({drains: "0+0x100 1+0x30"}, {name: name == fires for name in (decode, prefill)}))
    _evaluate(tmp_path, cases)


def test_the_evaluation_would_notice(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="BatonKvFull"):
        _evaluate(tmp_path, [({}, {"BatonKvFull": True})])
