"""The planner's loop: it acts on what it can know, and holds still otherwise."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from pathlib import Path

import pytest
import yaml

from baton.planner.prometheus import MAX_BYTES, Prometheus, PrometheusError
from tests.support.planner_world import QUERIES, World, world
from tests.support.prometheus import needs_prometheus, promtool

DECISIONS = "baton_planner_decisions_total"


async def settled(here: World) -> None:
    """Until no switch is under way."""
    for _ in range(100):
        if not here.service.switching:
            return
        await asyncio.sleep(0.01)
    raise TimeoutError("a switch goes on for ever")


@pytest.mark.deep
async def test_more_load_asks_for_more_pods() -> None:
    async with world() as here:
        plan = await here.service.decide()
        assert plan is not None and plan.size is not None
        assert here.scales.replicas["baton-prefill"] == plan.size.workers.prefill > 2
        assert here.count("baton_planner_scalings_total", role="prefill", direction="up", result="ok") == 1
        assert here.count("baton_planner_replicas", role="prefill") == 2
        assert here.count("baton_planner_workers", role="prefill", state="wanted") > 2
        assert here.count(DECISIONS, result="acted") == 1


async def test_nothing_is_said_before_anybody_was_asked(caplog: pytest.LogCaptureFixture) -> None:
    async with world() as here:
        here.discovery.staleness_s = math.inf
        with caplog.at_level(logging.DEBUG, "baton.planner"):
            planning = asyncio.create_task(here.service.run(60.0))
            await asyncio.sleep(0.3)
            assert not caplog.records and not here.count(DECISIONS, result="held")
            here.discovery.staleness_s = 0.0
            here.service.hear(here.discovery.known)
            for _ in range(100):
                if here.count(DECISIONS, result="acted"):
                    break
                await asyncio.sleep(0.02)
        assert here.count(DECISIONS, result="acted") == 1
        planning.cancel()


async def test_an_api_server_that_never_says_a_word_is_told_in_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with world() as here:
        here.discovery.staleness_s = math.inf
        here.service._stale_s = 0.1
        with caplog.at_level(logging.INFO, "baton.planner"):
            planning = asyncio.create_task(here.service.run(0.05))
            await asyncio.sleep(0.5)
        planning.cancel()
        assert here.count("baton_planner_held_total", by="kubernetes") >= 2
        assert caplog.text.count("has not told who the workers are yet") == 1


async def test_a_dry_run_says_what_it_would_do_and_does_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "baton.planner"):
        async with world(dry_run=True) as here:
            await here.service.decide()
            assert here.scales.written == []
            assert here.count(DECISIONS, result="dry_run") == 1
    assert "dry run: scale prefill from 2 to" in caplog.text
    assert "26000 prompt tokens/s" in caplog.text


async def test_a_full_budget_turns_a_worker_over() -> None:
    """Of those that have the least to end; until Prometheus has heard of it, by its own word."""
    async with world(prefill=2, decode=4, gpu_budget=6) as here:
        await here.service.decide()
        await settled(here)
        assert [worker.role for worker in here.workers].count("prefill") > 2
        turned = sum(worker.role == "prefill" for worker in here.workers[2:])
        assert here.count("baton_planner_switches_total", to="prefill", result="switched") == turned
        await here.service.decide()
        assert here.count("baton_planner_workers", role="prefill", state="ready") == 2 + turned
        assert here.scales.written == []


async def test_a_switch_that_fails_is_counted_and_changes_nothing() -> None:
    async with world(prefill=2, decode=4, gpu_budget=6) as here:
        for worker in here.workers:
            worker.refuses = True
        await here.service.decide()
        await settled(here)
        assert here.count("baton_planner_switches_total", to="prefill", result="failed") >= 1
        asked = here.count("baton_planner_switches_total", to="prefill", result="failed")
        for _ in range(4):
            await here.service.decide()
            await settled(here)
        assert here.count("baton_planner_workers", role="prefill", state="ready") == 2
        failed = here.count("baton_planner_switches_total", to="prefill", result="failed")
        assert asked < failed <= 4, "each is asked once, and then left in peace"


async def test_where_nobody_switches_pods_are_asked_for_instead() -> None:
    async with world(prefill=2, decode=6) as here:
        for worker in here.workers:
            worker.refuses = True
        for _ in range(8):
            await here.service.decide()
            await settled(here)
        assert here.count("baton_planner_switches_total", to="prefill", result="failed") == 6
        lacking = here.count("baton_planner_workers", role="prefill", state="needed_ahead")
        assert here.scales.replicas["baton-prefill"] >= lacking > 2


async def test_somebody_elses_change_is_not_overwritten() -> None:
    async with world() as here:
        here.scales.meddle = True
        await here.service.decide()
        assert here.scales.written == []
        assert (
            here.count("baton_planner_scalings_total", role="prefill", direction="up", result="conflict") == 1
        )


@pytest.mark.parametrize(
    ("lack", "by", "word"),
    [
        ("body", "prometheus", "no answer of Prometheus' API"),
        ("stale", "measurements", "61 s old"),
        ("unknown", "measurements", "Prometheus has nothing of requests"),
        ("few", "measurements", "Prometheus has figures of 0 decode workers"),
        ("api", "kubernetes", "no scale"),
        ("discovery", "kubernetes", "the API server has not told"),
    ],
)
async def test_it_holds_still_without(
    lack: str, by: str, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with world() as here:
        if lack == "body":
            here.prometheus.body = b"<html>"
        elif lack == "stale":
            here.prometheus.values["age_of_workers"] = 61.0
        elif lack == "unknown":
            del here.prometheus.values["requests"]
        elif lack == "few":
            here.prometheus.values["told_decode"] = 0.0
        elif lack == "discovery":
            here.discovery.staleness_s = 61.0
        else:
            await here.sites[0].cleanup()
        with caplog.at_level(logging.INFO, "baton.planner"):
            plan = await here.service.decide()
        assert plan is None or plan.held
        assert here.scales.written == []
        assert here.count("baton_planner_held_total", by=by) == 1
        assert here.count(DECISIONS, result="held") == 1
        assert "change nothing: " in caplog.text and word in caplog.text


async def test_it_holds_still_without_credentials_until_there_are_some() -> None:
    async with world() as here:
        here.scales.unauthorized = True
        for _ in range(2):  # refused, and then without any
            await here.service.decide()
        here.scales.unauthorized = False
        assert here.count("baton_planner_held_total", by="kubernetes") == 2
        await here.service.decide()
        assert here.scales.written


def answer(**parts: object) -> bytes:
    return json.dumps({"status": "success", "data": {"resultType": "vector", "result": []}} | parts).encode()


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"x" * (MAX_BYTES + 1), "an answer of more than"),
        (answer(data={"resultType": "matrix", "result": []}), "a matrix where a vector was asked for"),
        (answer(status="error", error="parse error"), "parse error"),
        (
            answer(data={"resultType": "vector", "result": [{"metric": {}, "value": [0, "1"]}] * 2}),
            "2 series where one",
        ),
        (
            answer(data={"resultType": "vector", "result": [{"metric": {}, "value": [0, "one"]}]}),
            "'one' is no number",
        ),
    ],
)
async def test_what_is_no_number_is_refused_by_name(body: bytes, word: str) -> None:
    async with world() as here, Prometheus(here.prometheus.url) as prometheus:
        here.prometheus.body = body
        with pytest.raises(PrometheusError, match=word):
            await prometheus.value("up")


async def test_a_mean_of_nothing_is_none() -> None:
    async with world() as here, Prometheus(here.prometheus.url) as prometheus:
        here.prometheus.body = answer(
            data={"resultType": "vector", "result": [{"metric": {}, "value": [0, "NaN"]}]}
        )
        assert await prometheus.value("up") is None


@needs_prometheus
def test_workers_that_have_decoded_nothing_are_left_out_of_what_a_step_takes(tmp_path: Path) -> None:
    labels = 'namespace="serving", role="decode", model="m"'
    series = {"a": (0.02, 0.0004), "b": (0.04, 0.0), "new": (0.0, 0.0)}
    told = [
        {"series": f'baton_decode_step_{part}_seconds{{instance="{name}", {labels}}}', "values": f"{value}x1"}
        for name, fit in series.items()
        for part, value in zip(("base", "row"), fit, strict=True)
    ]
    asked = [
        {"expr": QUERIES.all()[name], "exp_samples": [{"labels": "{}", "value": value}]}
        for name, value in (("step_base", 0.03), ("step_row", 0.0002))
    ]
    path = tmp_path / "steps_test.yaml"
    path.write_text(yaml.safe_dump({"tests": [{"input_series": told, "promql_expr_test": asked}]}))
    promtool("test", "rules", str(path))
