"""The page's waterfall of a request that was resumed on another worker: what ``baton explain`` says of it."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from baton.cli.explain import explain
from baton.router.api.http.app import app_for
from baton.router.api.service import CompletionService
from baton.router.api.settings import ApiSettings
from baton.router.placement import Decision, Prompt, WorkerReport
from baton.router.placement.policy import Candidate
from baton.router.traces.origin import NOWHERE
from baton.router.traces.record import AnswerTrace, Attempt, Delivered, Placed, RequestTrace
from baton.router.traces.store import Traces
from baton.router.ui.history import History
from baton.telemetry.admission import AdmissionMetrics
from baton.telemetry.metrics import RouterMetrics
from baton.v1 import worker_pb2 as pb
from tests.support.api_server import serving_app
from tests.support.browser import CHROMIUM, browsing
from tests.support.fake_ring import FakeRing
from tests.support.tiny_tokenizers import byte_level_tokenizer

ID = "chatcmpl-00ab"


def attempt(number: int, begun: float, decode: str) -> Attempt:
    """One that was handed on: 80 ms of computing, and blocks in flight beside it."""
    ways = [
        Candidate(to, "p:1", 64, 0.002, 0.08, 0.004, 0.0, 0.01, 0.2 + rank, 0.0, 0.286 + rank)
        for rank, to in enumerate((decode, "d:9"))
    ]
    placed = Placed.of(
        Decision(Prompt(900), ways[0], tuple(ways)),
        lambda address: WorkerReport(address, "prefill" if address[0] == "p" else "decode", 120, 3),
    )
    tried = Attempt(number, begun, decode, "p:1", placed, started=begun + 0.004)
    compute = pb.ComputePhases(
        link_us=1000, room_us=2000, queue_us=3000, compute_us=80_000, publish_us=500, cached_tokens=64
    )
    flight = {"room_us": 1500, "wait_us": 20_000, "grant_us": 500, "transfer_us": 60_000}
    handoff = pb.HandoffPhases(**flight, flush_us=4000, commit_us=1000, connector="tcp")
    tried.tell(pb.Phases(compute=compute), begun + 0.09)
    tried.tell(pb.Phases(handoff=handoff), begun + 0.1)
    tried.tell(pb.Phases(join=pb.JoinPhases(queue_us=500, step_us=5000, publish_us=100)), begun + 0.11)
    return tried


def resumed(traces: Traces) -> None:
    """A request whose first decode worker was lost after a while."""
    arrived = time.perf_counter() - 1.0
    answer = AnswerTrace(0)
    lost = attempt(0, arrived + 0.01, "d:1")
    lost.end(arrived + 0.4, "worker_lost: <b>d:1</b> is gone")
    for each in (lost, attempt(1, arrived + 0.42, "d:2")):
        answer.begun(each)
    trace = RequestTrace(
        request_id=ID,
        endpoint="/v1/chat/completions",
        model="m",
        tenant="t",
        origin=NOWHERE,
        prompt_tokens=900,
        arrived=arrived,
        answers=[answer],
        read=arrived + 0.001,
        admitted=arrived + 0.002,
        turn=arrived + 0.008,
    )
    trace.deliveries = lambda: [Delivered(arrived + 0.101, arrived + 0.9, 80, finished=True)]
    traces.begin(trace)
    traces.end(trace, "completed")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: the page's waterfall is NOT tested")
async def test_a_resumed_requests_waterfall_is_what_explain_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces, metrics = Traces(), RouterMetrics(CollectorRegistry())
    resumed(traces)
    service = CompletionService(
        FakeRing(lambda call: [70]), byte_level_tokenizer(tmp_path), ApiSettings(), metrics, traces=traces
    )
    history = History(metrics, [], AdmissionMetrics(CollectorRegistry()))
    app = app_for(service, history=history)
    async with serving_app(app) as url, browsing(tmp_path / "browser") as page:
        said = await asyncio.to_thread(explain, url, ID)
        find = traces.find

        def failing(request_id: str, tenant: str | None) -> RequestTrace | None:
            monkeypatch.setattr(traces, "find", find)
            raise RuntimeError("the first look fails")

        monkeypatch.setattr(traces, "find", failing)
        await page.open(f"{url}/ui#requests/{ID}")
        await page.until("document.querySelectorAll('.phases tr.phase').length > 0")
        lines = re.findall(r"^ +([\d.]+) \+ +([\d.]+) ms  (\S+) ", said, re.MULTILINE)
        shown = await page.evaluate(
            """[...document.querySelectorAll('.phases tr.phase')].map((row) =>
              ['.start', '.took', '.name'].map((cell) => row.querySelector(cell).textContent))"""
        )
        assert [each[1:] for each in shown] == [list(each[1:]) for each in lines]
        assert "resume" in [name for *_, name in lines] and len(lines) > 20
        attempts = await page.evaluate(
            "[...document.querySelectorAll('.phases .attempt')].map((row) => row.textContent)"
        )
        assert ["d:1" in attempts[0], "d:2" in attempts[1]] == [True, True] and len(attempts) == 2
        assert "ended at 400.0 ms: worker_lost: <b>d:1</b> is gone" in attempts[0], "text, not markup"
        notes = await page.evaluate(
            "[...document.querySelectorAll('.handoff-note')].map((note) => note.textContent)"
        )
        handoffs = re.findall(r"(handoff over .+)$", said, re.MULTILINE)
        assert notes == [f"attempt {number}: {told}" for number, told in enumerate(handoffs)]
        chosen = await page.evaluate(
            "[...document.querySelectorAll('.ways tbody tr')].map((row) => row.cells[1].textContent)"
        )
        assert chosen == re.findall(r": cost ([\d.]+) ms", said) and len(chosen) == 4
        bars = await page.evaluate("document.querySelectorAll('.phase .lane-bars rect').length")
        assert bars >= len(lines) - 1, "the bar of what is beyond the axis is left out"
        assert len(page.errors) == 1 and "500" in page.errors[0], "it looked again after that"
