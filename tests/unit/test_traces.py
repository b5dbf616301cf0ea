"""Traces: phases without a gap, a bounded store, what the ring and its workers put in, and who may see it."""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import time
import tracemalloc
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import grpc
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace.status import StatusCode
from prometheus_client import CollectorRegistry

from baton.cli.explain import explain
from baton.core.priority import NO_PRIORITY
from baton.core.role import Role
from baton.core.sampling_params import ResolvedSampling
from baton.process.options import UserError
from baton.router.api.authentication import Authentication
from baton.router.api.grpc.service import add_services
from baton.router.api.http.app import app_for
from baton.router.api.service import CompletionService
from baton.router.api.settings import ApiSettings
from baton.router.dispatch.types import Request, TokenChunk
from baton.router.placement import Decision, Prompt, WorkerReport
from baton.router.placement.policy import Candidate
from baton.router.security.keys import KeyFile, entry_line, new_key
from baton.router.shared.limits import Limits, Tenant
from baton.router.traces.origin import NOWHERE, Origin, SpanContext
from baton.router.traces.otlp import Exporter
from baton.router.traces.phases import MEANING, phases_of
from baton.router.traces.record import (
    MAX_ATTEMPTS,
    MAX_CANDIDATES,
    AnswerTrace,
    Attempt,
    Delivered,
    Placed,
    RequestTrace,
)
from baton.router.traces.store import Traces
from baton.telemetry.metrics import RouterMetrics
from baton.v1 import inference_pb2
from baton.v1 import worker_pb2 as pb
from baton.v1.inference_pb2_grpc import InferenceStub
from tests.support.api_server import serving_app
from tests.support.fake_ring import FakeRing
from tests.support.local_worker import LocalWorker, local_ring, until
from tests.support.tiny_tokenizers import byte_level_tokenizer
from tests.unit.test_beam_engine import beams


def candidate(decode: str, prefill: str | None = None) -> Candidate:
    seconds = [1.1 * count for count in range(8)]  # objects of their own, for what they weigh
    return Candidate(decode, prefill, 0, *seconds)


def placed(ways: int = 1) -> Placed:
    considered = tuple(candidate(f"d{way}", f"p{way}") for way in range(ways))
    decision = Decision(Prompt(10), considered[-1], considered)

    def report(address: str) -> WorkerReport:
        return WorkerReport(address, "decode", 1000, 300, float(ways), prefill_tokens_per_s=2.0 * ways)

    return Placed.of(decision, report)


def trace_of(
    name: str = "cmpl-aa", tenant: str = "t", answers: int = 1, origin: Origin = NOWHERE
) -> RequestTrace:
    return RequestTrace(
        request_id=name,
        endpoint="/v1/completions",
        model="m",
        tenant=tenant,
        origin=origin,
        prompt_tokens=10,
        arrived=100.0,
        answers=[AnswerTrace(index) for index in range(answers)],
    )


# --- phases


NOTHING = Delivered(0.0, 0.0, 0)
moments = st.floats(0.0, 1.0, allow_nan=False)
durations = st.integers(0, 2_000_000)


@st.composite
def attempts(draw: st.DrawFn, number: int, begun: float, ended: float | None) -> Attempt:
    attempt = Attempt(number, begun, "d", draw(st.sampled_from([None, "p"])), placed(), ended=ended)

    def told(phases: pb.Phases) -> None:
        if draw(st.booleans()):
            attempt.tell(phases, begun + draw(moments))

    one = [draw(durations) for _ in range(11)]
    told(
        pb.Phases(
            compute=pb.ComputePhases(link_us=one[0], room_us=one[1], queue_us=one[2], compute_us=one[3])
        )
    )
    told(pb.Phases(handoff=pb.HandoffPhases(flush_us=one[4], commit_us=one[5])))
    told(pb.Phases(join=pb.JoinPhases(queue_us=one[6], step_us=one[7], publish_us=one[8])))
    return attempt


@st.composite
def traces(draw: st.DrawFn) -> RequestTrace:
    trace = trace_of()
    steps = sorted(draw(st.lists(moments, min_size=8, max_size=8)))
    at = [100.0 + step for step in steps]
    trace.read = at[0]
    trace.admitted = draw(st.sampled_from([None, at[1]]))
    trace.turn = None if trace.admitted is None else draw(st.sampled_from([None, at[2]]))
    if trace.turn is not None:
        lost = draw(st.booleans())
        if lost:
            trace.answers[0].begun(draw(attempts(0, at[3], at[4])))
        trace.answers[0].begun(draw(attempts(1, at[5], None)))
        got = [draw(st.sampled_from([Delivered(at[6], at[7], 3, True), Delivered(at[6], at[7], 3), NOTHING]))]
        trace.deliveries = lambda: got
    if draw(st.booleans()):
        trace.end("completed")
        trace.ended = at[7] + draw(moments)
    return trace


@given(traces())
def test_phases_have_no_gap_and_no_overlap_whatever_workers_tell(trace: RequestTrace) -> None:
    now = 103.0
    phases = phases_of(trace, trace.answers[0], now)
    at = 0.0
    for phase in phases:
        assert phase.start == pytest.approx(at, abs=1e-6)
        assert phase.seconds > 0
        assert phase.name in MEANING
        at += phase.seconds
    end = now if trace.ended is None else trace.ended
    assert at == pytest.approx(end - trace.arrived, abs=1e-6)


def test_each_phase_has_its_place() -> None:
    trace = trace_of()
    trace.read, trace.admitted, trace.turn = 100.01, 100.02, 100.03
    attempt = Attempt(0, 100.04, "d", "p", placed())
    trace.answers[0].begun(attempt)
    compute = pb.ComputePhases(
        link_us=1000, room_us=2000, queue_us=3000, compute_us=4000, publish_us=5000, cached_tokens=16
    )
    attempt.tell(pb.Phases(compute=compute), 100.06)
    attempt.tell(pb.Phases(handoff=pb.HandoffPhases(flush_us=6000, commit_us=7000)), 100.09)
    attempt.tell(pb.Phases(join=pb.JoinPhases(queue_us=1000, step_us=8000, publish_us=500)), 100.11)
    trace.deliveries = lambda: [Delivered(100.061, 100.2, 9, True)]
    trace.end("completed")
    trace.ended = 100.21
    found = {p.name: round(1e3 * p.seconds, 3) for p in phases_of(trace, trace.answers[0], 0.0)}
    assert found == {
        "route.read": 10.0,
        "route.limits": 10.0,
        "route.queue": 10.0,
        "route.place": 10.0,
        "prefill.network": 5.0,
        "prefill.link": 1.0,
        "prefill.room": 2.0,
        "prefill.queue": 3.0,
        "prefill.compute": 4.0,
        "prefill.publish": 5.0,
        "deliver": 1.0,
        "handoff.network": 16.0,
        "handoff.flush": 6.0,
        "handoff.commit": 7.0,
        "decode.network": 10.5,
        "decode.queue": 1.0,
        "decode.first_step": 8.0,
        "decode.publish": 0.5,
        "decode.steps": 90.0,
        "finish": 10.0,
    }


def test_a_choice_that_is_over_is_not_told_of_what_became_of_the_others() -> None:
    trace = trace_of(answers=2)
    trace.read = trace.admitted = trace.turn = 100.0
    shared = Attempt(0, 100.0, "d", None, placed())
    shared.tell(pb.Phases(compute=pb.ComputePhases(compute_us=100_000)), 100.1)
    for answer in trace.answers:
        answer.begun(shared)
    shared.end(100.5, "worker_lost: gone")
    trace.answers[1].begun(Attempt(1, 100.6, "d", None, placed()))
    trace.deliveries = lambda: [Delivered(100.1, 100.3, 5, True), Delivered(100.1, 100.4, 6)]
    names = [[phase.name for phase in phases_of(trace, answer, 101.0)] for answer in trace.answers]
    assert names == [
        ["prefill.compute", "decode.steps", "finish"],
        ["prefill.compute", "decode.steps", "resume", "prefill.untold"],
    ]


# --- the store


def ended(traces: Traces, number: int, tenant: str = "acme", *, begun: bool = True) -> RequestTrace:
    trace = trace_of(f"cmpl-{number:032x}", tenant)
    traces.begin(trace)
    if begun:
        trace.answers[0].begun(Attempt(0, 1.0, "d", None, placed()))
    traces.end(trace, "completed" if begun else "overloaded")
    return trace


def test_the_store_is_bounded_by_count_and_by_bytes() -> None:
    traces = Traces(max_requests=4)
    for number in range(5):
        ended(traces, number)
    assert len(traces) == 3, "a place is left for one that was refused"
    assert traces.find(f"cmpl-{1:032x}", None) is None
    assert traces.find(f"{4:032x}", None) is not None
    small = Traces(max_bytes=20_000)
    for number in range(100):
        ended(small, number)
    assert 1 <= len(small) <= 6 and small.num_bytes <= 20_000
    none = Traces(max_requests=0)
    trace = trace_of()
    none.begin(trace)
    assert none.find(trace.request_id, None) is trace, "what runs can be explained all the same"
    none.end(trace, "completed")
    assert len(none) == 0 and none.num_bytes == 0


def test_refused_requests_do_not_drive_out_those_that_ran() -> None:
    traces = Traces(max_requests=100)
    ran = [ended(traces, number) for number in range(80)]
    refused = [ended(traces, number, begun=False) for number in range(100, 1100)]
    assert all(traces.find(trace.request_id, None) is trace for trace in ran)
    kept = [trace for trace in refused if traces.find(trace.request_id, None) is trace]
    assert kept == refused[-10:]
    late = ended(traces, 2000)
    assert list(traces.latest(None)) == [late, *reversed(kept), *reversed(ran)], "by when they ended"
    assert len(traces) == 91


@pytest.mark.parametrize(("most", "most_bytes"), [(100, 1 << 30), (10_000, 300_000)])
def test_a_tenants_flood_drives_out_its_own_requests(most: int, most_bytes: int) -> None:
    traces = Traces(most, most_bytes)
    own = [ended(traces, number) for number in range(5)]
    flood = [ended(traces, number, "evil") for number in range(100, 5000)]
    assert all(traces.find(trace.request_id, "acme") is trace for trace in own)
    assert list(traces.latest("acme")) == own[::-1]
    kept = list(traces.latest("evil"))
    assert len(kept) > 5 and kept == flood[::-1][: len(kept)]
    assert list(traces.latest(None)) == [*kept, *own[::-1]]
    more = [ended(traces, number) for number in range(10_000, 15_000)]
    assert traces.find(more[-1].request_id, "acme") is more[-1]
    assert traces.find(flood[-1].request_id, "evil") is flood[-1], "and the other way round"


def test_the_store_takes_no_more_than_it_says() -> None:
    def filled() -> Traces:
        traces = Traces(max_requests=10**6, max_bytes=1 << 30)
        for number in range(200):
            trace = trace_of(f"cmpl-{number:032x}", f"tenant {number}", answers=3)
            for tried in range(2):
                attempt = Attempt(tried, 1.5 + number, "10.0.0.1:9000", "10.0.0.2:9000", placed(9))
                for part in (
                    {"compute": pb.ComputePhases(queue_us=70 + number, compute_us=9)},
                    {"handoff": pb.HandoffPhases(flush_us=70 + number, connector="tcp")},
                    {"join": pb.JoinPhases(queue_us=70 + number)},
                ):
                    attempt.tell(pb.Phases(**part), 2.5 + number)
                for answer in trace.answers:
                    answer.begun(attempt)
            traces.begin(trace)
            traces.end(trace, "completed")
        return traces

    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    traces = filled()
    gc.collect()
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert taken <= traces.num_bytes < 4 * taken, (taken, traces.num_bytes)


def test_attempts_and_candidates_are_bounded() -> None:
    answer = AnswerTrace(0)
    for number in range(100):
        answer.begun(Attempt(number, 0.0, "d", None, placed()))
    assert [each.number for each in answer.attempts] == [0, *range(101 - MAX_ATTEMPTS, 100)]
    assert answer.left_out == 100 - MAX_ATTEMPTS
    many = placed(50)
    assert len(many.considered) == MAX_CANDIDATES
    assert many.considered[0] is many.chosen
    assert len(many.reports) == 2 * MAX_CANDIDATES


def test_a_request_is_found_by_any_of_its_names_and_by_its_tenant_alone() -> None:
    traces = Traces()
    trace = trace_of(f"chatcmpl-{7:032x}", "acme", origin=Origin("mine"))
    traces.begin(trace)
    for name in (f"chatcmpl-{7:032x}", f"{7:032x}", f"chatcmpl-{7:032x}-0", f"msg_{7:032x}", "mine"):
        assert traces.find(name, None) is trace
        assert traces.find(name, "acme") is trace
        assert traces.find(name, "other") is None
    assert traces.find("", None) is None
    assert list(traces.latest("other")) == []


@pytest.mark.parametrize(
    ("header", "sampled"),
    [
        ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", True),
        ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00", False),
        ("cc-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-what-the-future-will-be-like", True),
    ],
)
def test_a_traceparent_is_read_and_written(header: str, sampled: bool) -> None:
    parsed = SpanContext.parse(header)
    assert parsed is not None and parsed.sampled is sampled
    assert parsed.header == "00" + header[2:55]
    child = parsed.child()
    assert (child.trace_id, child.sampled) == (parsed.trace_id, sampled) and child.span_id != parsed.span_id


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "00-00000000000000000000000000000000-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
        "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-extra",
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
    ],
)
def test_a_traceparent_that_is_none_counts_for_nothing(header: str) -> None:
    assert SpanContext.parse(header) is None


# --- the ring


PARAMS = ResolvedSampling(max_tokens=30, temperature=0.0, ignore_eos=True)
PROMPT = list(range(3, 40))


async def test_workers_tell_each_part_once_and_a_resumed_request_shows_each_attempt() -> None:
    workers = [LocalWorker(role, step_s=0.01) for role in ("prefill", "decode", "decode")]
    async with local_ring(workers) as ring:
        traced = AnswerTrace(0)
        frames: list[pb.Frame] = []
        take = ring.on_frame
        ring.on_frame = lambda worker, frame: (frames.append(frame), take(worker, frame))[1]  # type: ignore
        tokens = 0
        with ring.generate(PROMPT, [Request("r-0", PARAMS, b"", traced)], NO_PRIORITY) as [chunks]:
            async for chunk in chunks:
                tokens += len(chunk.token_ids)
                if tokens == 10:
                    await max(workers[1:], key=lambda worker: worker.held).stop()
        assert tokens == PARAMS.max_tokens
        first, second = traced.attempts
        told = [(each.attempt, each.WhichOneof("part")) for frame in frames for each in frame.phases]
        parts = ("compute", "handoff", "join")
        assert sorted(told) == sorted((attempt, part) for attempt in (0, 1) for part in parts)
    assert first.ended is not None and first.why.startswith("worker_lost: ")
    assert first.number == 0 and first.why.endswith("was lost, in attempt 0"), "all count from 0"
    assert second.ended is None and second.decode != first.decode
    for attempt in (first, second):
        assert attempt.prefill == workers[0].address
        assert attempt.started is not None
        assert attempt.compute is not None and attempt.handoff is not None and attempt.join is not None
        compute = attempt.compute
        assert compute.compute >= 0.009, "a step takes 10 ms"
        whole = compute.link + compute.room + compute.queue + compute.compute + compute.publish
        assert whole <= compute.at - attempt.submitted
        assert attempt.join.step >= 0.009
        assert attempt.handoff.connector == "tcp"
        assert {attempt.placed.chosen.decode, attempt.placed.chosen.prefill} == {
            attempt.decode,
            attempt.prefill,
        }
        assert attempt.placed.reports


@pytest.mark.parametrize("roles", [("prefill", "decode"), ("both",)])
@pytest.mark.parametrize("kind", ["several", "beams"])
async def test_answers_that_go_together_share_an_attempt(kind: str, roles: tuple[Role, ...]) -> None:
    params = PARAMS if kind == "several" else beams(2, max_tokens=8, stops=frozenset())
    traced = [AnswerTrace(index) for index in range(2)]
    requests = [Request(f"r-{each.index}", replace(params, seed=each.index), b"", each) for each in traced]
    async with local_ring([LocalWorker(role, step_s=0.01) for role in roles]) as ring:
        with ring.generate(PROMPT, requests, NO_PRIORITY) as answers:

            async def take(chunks: AsyncGenerator[TokenChunk]) -> None:
                async for _ in chunks:
                    pass

            began = time.perf_counter()
            await asyncio.gather(*map(take, answers))
            took = time.perf_counter() - began
    [attempt] = traced[0].attempts
    assert traced[1].attempts == [attempt]
    assert attempt.compute is not None and 0.009 <= attempt.compute.compute < took
    handed_on = len(roles) == 2
    assert (attempt.handoff is not None, attempt.join is not None) == (handed_on, handed_on)
    told_of = [each.at for each in (attempt.compute, attempt.handoff, attempt.join) if each is not None]
    assert told_of == sorted(told_of) and told_of[-1] < began + took, "not with a load report, later"


async def test_a_request_that_waits_is_explained_while_it_does() -> None:
    worker = LocalWorker("both", step_s=0.05)
    async with local_ring([worker]) as ring:
        traced = AnswerTrace(0)
        with ring.generate(PROMPT, [Request("r-0", PARAMS, b"", traced)], NO_PRIORITY) as [chunks]:
            asking = asyncio.create_task(anext(chunks))
            await until(lambda: traced.attempts and traced.attempts[0].started is not None)
            trace = trace_of()
            trace.arrived = trace.read = trace.admitted = trace.turn = time.perf_counter() - 1
            trace.answers = [traced]
            [*_, last] = phases_of(trace, traced, time.perf_counter())
            assert last.name == "prefill.untold"
            await asking


# --- spans


def test_spans_of_several_attempts_and_choices_through_the_exporter() -> None:
    memory = InMemorySpanExporter()
    exporter = Exporter(memory)
    traces = Traces(on_end=exporter.on_end, sample=1.0)
    trace = trace_of("cmpl-bb", answers=2, origin=traces.origin(None, None))
    trace.read, trace.admitted, trace.turn = 100.01, 100.02, 100.03
    lost = Attempt(0, 100.04, "d1", "p", placed(3), ended=100.10, why="worker_lost: d1 is gone")
    lost.tell(pb.Phases(compute=pb.ComputePhases(compute_us=20_000)), 100.07)
    again = Attempt(1, 100.12, "d2", None, placed(1))
    again.tell(pb.Phases(compute=pb.ComputePhases(compute_us=10_000)), 100.14)
    for answer in trace.answers:
        answer.begun(lost)
        answer.begun(again)
    trace.deliveries = lambda: [Delivered(100.08, 100.3, 9, True), Delivered(100.08, 100.2, 5, True)]
    traces.begin(trace)
    trace.ended = None
    traces.end(trace, "overloaded")
    unsampled = trace_of("cmpl-cc", origin=Traces(sample=0.0).origin(None, None))
    traces.begin(unsampled)
    traces.end(unsampled, "completed")
    exporter.close()
    spans = memory.get_finished_spans()
    root, *others = spans
    assert root.name == "POST /v1/completions" and root.parent is None
    assert root.status.status_code is StatusCode.ERROR and root.status.description == "overloaded"
    assert {span.context.trace_id for span in spans} == {root.context.trace_id}
    assert len({span.context.span_id for span in spans}) == len(spans)
    names = [span.name for span in others]
    assert names.count("route.read") == 1
    for name in (f"attempt {number} of choice {index}" for number in (0, 1) for index in (0, 1)):
        assert names.count(name) == 1, names
    failed = next(span for span in others if span.name == "attempt 0 of choice 0")
    assert failed.status.status_code is StatusCode.ERROR and "d1 is gone" in str(failed.status.description)
    considered = failed.attributes["baton.placement.considered"]
    assert isinstance(considered, tuple) and len(considered) == 3
    places = [span.resource.attributes["service.instance.id"] for span in others if span.name == "prefill"]
    assert places.count("d2") == 2, "an attempt without prefill computes at decode"


def test_what_is_sampled_is_up_to_the_client_then_to_the_ratio() -> None:
    never, always = Traces(sample=0.0), Traces(sample=1.0)
    header = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0{}"
    for traces in (never, always):
        for flag in (0, 1):
            span = traces.origin(None, header.format(flag)).span
            assert span is not None and span.sampled is bool(flag)
    for traces, sampled in ((never, False), (always, True)):
        span = traces.origin(None, "nonsense").span
        assert span is not None and span.sampled is sampled
    half = [Traces(sample=0.5).origin(None, None).span for _ in range(400)]
    assert 120 < sum(span is not None and span.sampled for span in half) < 280
    assert Traces().origin("mine", header.format(1)) == Origin("mine")


# --- who may see it


async def test_tenants_see_their_own_requests_and_operators_all(tmp_path: Path) -> None:
    keys = {name: new_key() for name in ("acme", "other", "root")}
    lines = [entry_line(key, name, name) for name, key in keys.items()]
    lines[2] = lines[2].replace('"tenant"', '"operator": true, "tenant"')
    file = tmp_path / "keys.yaml"
    file.write_text("\n".join(["keys:", *lines]))
    ring = FakeRing(lambda call: [70, 71], error=None)
    service = CompletionService(
        ring,
        byte_level_tokenizer(tmp_path),
        ApiSettings(),
        RouterMetrics(CollectorRegistry()),
        authentication=Authentication(KeyFile(str(file), Limits()).find, Tenant()),
    )
    body = {"prompt": [5, 6, 7], "max_tokens": 4}
    async with serving_app(app_for(service)) as url, httpx.AsyncClient(base_url=url) as http:

        async def get(path: str, who: str) -> httpx.Response:
            return await http.get(path, headers={"authorization": f"Bearer {keys[who]}"})

        asked = await http.post(
            "/v1/completions",
            json=body,
            headers={"authorization": f"Bearer {keys['acme']}", "x-request-id": "my-id"},
        )
        assert asked.status_code == 200, asked.text
        timing = asked.headers["server-timing"]
        assert timing.startswith("route;dur=")
        minted = asked.headers["x-baton-request-id"]
        assert asked.headers["x-request-id"] == "my-id" and asked.json()["id"] == f"cmpl-{minted}"
        path = f"/debug/requests/{minted}"
        assert (await http.get(path)).status_code == 401
        own = await get(path, "acme")
        assert own.status_code == 200 and own.json()["outcome"] == "completed"
        assert (await get("/debug/requests/my-id", "acme")).json() == own.json()
        unknown = await get("/debug/requests/" + "0" * 32, "other")
        foreign = await get(path, "other")
        assert foreign.status_code == unknown.status_code == 404
        assert foreign.text.replace(minted, "") == unknown.text.replace("0" * 32, "")
        assert (await get(path, "root")).status_code == 200
        counts = {who: len((await get("/debug/requests", who)).json()["requests"]) for who in keys}
        assert counts == {"acme": 1, "other": 0, "root": 1}
        for limit in ("0", "101", "x", "-1", "9" * 5000):
            assert (await get(f"/debug/requests?limit={limit}", "root")).status_code == 400
        said = await asyncio.to_thread(explain, url, minted, api_key=keys["root"])
        assert "completed" in said and "route.read" in said
        listed = await asyncio.to_thread(explain, url, None, api_key=keys["root"])
        assert minted in listed
        as_json = await asyncio.to_thread(explain, url, minted, as_json=True, api_key=keys["root"])
        assert json.loads(as_json)["client_request_id"] == "my-id"
        with pytest.raises(UserError, match="Nothing is known of request"):
            await asyncio.to_thread(explain, url, "nobody", api_key=keys["root"])


async def test_a_grpc_call_brings_its_trace_along_and_can_be_explained(tmp_path: Path) -> None:
    traces = Traces(sample=0.0)
    service = CompletionService(
        FakeRing(lambda call: [70, 71]),
        byte_level_tokenizer(tmp_path),
        ApiSettings(),
        RouterMetrics(CollectorRegistry()),
        traces=traces,
    )
    server = grpc.aio.server()
    add_services(server, service)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    header = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        request = inference_pb2.GenerateRequest(text="hi", params=inference_pb2.SamplingParams(max_tokens=4))
        call = InferenceStub(channel).Generate(request, metadata=(("traceparent", header),))
        responses = [response async for response in call]
    await server.stop(None)
    trace = traces.find(responses[0].request_id, None)
    assert trace is not None and trace.outcome == "completed"
    assert trace.origin.parent is not None and trace.origin.parent.header == header
    assert trace.origin.span is not None and trace.origin.span.sampled


def test_what_tenants_are_told_names_no_worker() -> None:
    from baton.router.traces.document import document_of

    trace = trace_of()
    trace.admitted = trace.turn = trace.read
    trace.answers[0].begun(
        Attempt(0, trace.read, "10.1.1.1:9", "10.1.1.2:9", placed(), why="refused: 10.1.1.1")
    )
    assert "10.1.1" in json.dumps(document_of(trace))
    told = document_of(trace, workers=False)
    assert "10.1.1" not in json.dumps(told) and "d0" not in json.dumps(told)


WITHOUT_OPENTELEMETRY = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter", "opentelemetry.proto")):
            raise ImportError(name)

sys.meta_path.insert(0, Blocked())
from baton.router import main
from baton.router.config import RouterConfig

main._traces(RouterConfig(workers=("127.0.0.1:1",)))
try:
    main._traces(RouterConfig(workers=("127.0.0.1:1",), otlp_endpoint="http://a:4317"))
except main.StartError as error:
    print(error)
"""


def test_a_router_needs_opentelemetry_only_if_it_is_to_use_it() -> None:
    argv = [sys.executable, "-c", WITHOUT_OPENTELEMETRY]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=600)
    assert result.stdout == "--otlp-endpoint needs OpenTelemetry: pip install 'baton[otel]'\n", result.stderr
