"""``/debug/requests``: what a list selects, its pages, and what a tenant is shown of it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from baton.core.role import Role
from baton.router.api.authentication import Authentication
from baton.router.api.http.app import app_for
from baton.router.api.service import CompletionService
from baton.router.api.settings import ApiSettings
from baton.router.placement import Decision, Prompt, WorkerReport
from baton.router.placement.policy import Candidate
from baton.router.security.keys import KeyFile, entry_line, new_key
from baton.router.shared.limits import Limits, Tenant
from baton.router.traces.origin import NOWHERE
from baton.router.traces.record import AnswerTrace, Attempt, Delivered, Placed, RequestTrace
from baton.router.traces.selection import Position, Selection
from baton.router.traces.store import Traces
from baton.telemetry.metrics import RouterMetrics
from tests.support.api_server import serving_app
from tests.support.fake_ring import FakeRing
from tests.support.tiny_tokenizers import byte_level_tokenizer

KEPT = 20


def begun(traces: Traces, number: int, tenant: str = "acme", model: str = "m") -> RequestTrace:
    """A request that arrived ``number`` seconds after the first one, and runs."""
    trace = RequestTrace(
        request_id=f"cmpl-{number:04x}",
        endpoint="/v1/completions",
        model=model,
        tenant=tenant,
        origin=NOWHERE,
        prompt_tokens=10,
        arrived=time.perf_counter() - 1000.0 + number,
        answers=[AnswerTrace(0)],
    )
    role: Role = "decode"
    way = Candidate("d:1", "p:1", 0, *([0.0] * 8))
    placed = Placed.of(
        Decision(Prompt(10), way, (way,)), lambda address: WorkerReport(address, role, 0, 0, 0.0)
    )
    for attempt in range(1 + number % 2):
        trace.answers[0].begun(Attempt(attempt, trace.arrived, f"d:{attempt}", "p:1", placed))
    traces.begin(trace)
    return trace


def ended(traces: Traces, trace: RequestTrace, outcome: str = "completed", ttft_s: float = 0.0) -> None:
    if ttft_s:
        first = trace.arrived + ttft_s
        trace.deliveries = lambda: [Delivered(first, first + 1.0, 5, finished=True)]
    traces.end(trace, outcome)


@asynccontextmanager
async def asking(tmp_path: Path, traces: Traces) -> AsyncIterator[tuple[httpx.AsyncClient, dict[str, str]]]:
    keys = {name: new_key() for name in ("acme", "root")}
    lines = [entry_line(key, name, name) for name, key in keys.items()]
    lines[1] = lines[1].replace('"tenant"', '"operator": true, "tenant"')
    file = tmp_path / "keys.yaml"
    file.write_text("\n".join(["keys:", *lines]))
    service = CompletionService(
        FakeRing(lambda call: [70]),
        byte_level_tokenizer(tmp_path),
        ApiSettings(),
        RouterMetrics(CollectorRegistry()),
        authentication=Authentication(KeyFile(str(file), Limits()).find, Tenant()),
        traces=traces,
    )
    async with serving_app(app_for(service)) as url, httpx.AsyncClient(base_url=url) as http:
        yield http, keys


async def listed(http: httpx.AsyncClient, key: str, **query: str | int | float) -> Any:
    answer = await http.get("/debug/requests", params=query, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    return answer.json()


def numbers(document: Any) -> list[int]:
    return [int(each["request_id"][5:], 16) for each in document["requests"]]


async def test_pages_follow_each_other_though_requests_come_and_end(tmp_path: Path) -> None:
    traces = Traces(max_requests=KEPT)
    running = [begun(traces, number) for number in range(10)]
    async with asking(tmp_path, traces) as (http, keys):
        first = await listed(http, keys["root"], limit=4)
        assert numbers(first) == [9, 8, 7, 6]
        ended(traces, running[2])
        begun(traces, 10)
        second = await listed(http, keys["root"], limit=4, before=first["next"])
        assert numbers(second) == [5, 4, 3, 2], "neither the new one nor any twice"
        last = await listed(http, keys["root"], limit=4, before=second["next"])
        assert numbers(last) == [1, 0] and last["next"] is None
        assert last["requests"][0]["num_attempts"] == 2 and last["requests"][1]["num_attempts"] == 1
        assert (last["requests"][0]["prefill"], last["requests"][0]["decode"]) == ("p:1", "d:1")


async def test_a_list_has_what_its_query_selects(tmp_path: Path) -> None:
    traces = Traces(max_requests=KEPT)
    ended(traces, begun(traces, 0), ttft_s=0.2)
    ended(traces, begun(traces, 1, model="other"), "cancelled", ttft_s=0.6)
    ended(traces, begun(traces, 2), "worker_lost", ttft_s=2.0)
    ended(traces, begun(traces, 3, tenant="else"), "timeout")
    begun(traces, 4)
    async with asking(tmp_path, traces) as (http, keys):
        for query, expected in (
            ({"model": "other"}, [1]),
            ({"tenant": "else"}, [3]),
            ({"outcome": "running"}, [4]),
            ({"outcome": "failed"}, [3, 2]),
            ({"outcome": "timeout"}, [3]),
            ({"min_ttft_ms": 500}, [4, 2, 1]),
            ({"min_ttft_ms": 0.0, "outcome": "completed", "model": "m"}, [0]),
            ({"outcome": "failed", "limit": 1}, [3]),
        ):
            assert numbers(await listed(http, keys["root"], **query)) == expected, query


async def test_a_tenant_sees_no_others_requests_no_workers_and_no_counts(tmp_path: Path) -> None:
    traces = Traces(max_requests=KEPT)
    for number in range(30):
        ended(traces, begun(traces, number, tenant="acme" if number % 3 == 0 else "else"))
    async with asking(tmp_path, traces) as (http, keys):
        own = await listed(http, keys["acme"], limit=100)
        assert set(numbers(own)) == set(range(3, 30, 3)), "as many as the tenant that asks for more"
        assert not {"prefill", "decode"} & set(own["requests"][0])
        assert own["kept"] == {"max_requests": KEPT, "max_bytes": 16 << 20, "num_dropped": None}
        assert numbers(await listed(http, keys["acme"], tenant="else")) == []
        everything = await listed(http, keys["root"], limit=100)
        assert everything["kept"]["num_dropped"] == 12 and everything["silent_processes"] == 0


async def test_what_selects_nothing_is_refused_by_its_name(tmp_path: Path) -> None:
    async with asking(tmp_path, Traces()) as (http, keys):
        for name, value in (
            ("min_ttft_ms", "nan"),
            ("min_ttft_ms", "-1"),
            ("min_ttft_ms", "slow"),
            ("before", "yesterday"),
            ("before", "1" * 13 + ".0-aa"),
            ("model", "m" * 257),
            ("status", "completed"),
        ):
            answer = await http.get(
                "/debug/requests",
                params={name: value},
                headers={"authorization": f"Bearer {keys['root']}"},
            )
            assert answer.status_code == 400 and answer.json()["error"]["param"] == name, (name, value)


@pytest.mark.parametrize("cursor", ["", "-", "12.5-", "12-aa", "x-aa", "12.5-ä", "1e9-aa"])
def test_a_cursor_is_one_of_a_list(cursor: str) -> None:
    assert Position.parse(cursor) is None
    assert Position.parse(Position(12.25, "cmpl-ab").cursor) == Position(12.25, "cmpl-ab")


def test_of_two_that_arrive_at_once_each_is_on_a_page() -> None:
    traces = Traces()
    one, other = begun(traces, 1), begun(traces, 2)
    other.wall = one.wall
    [first] = Selection(1).of(traces.searched(None))
    [second] = Selection(1, before=Position.of(first)).of(traces.searched(None))
    assert {first.key, second.key} == {one.key, other.key}
    assert not Selection(1, before=Position.of(second)).of(traces.searched(None))


def test_a_list_looks_at_the_latest_that_ended_and_at_all_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.router.traces.store.MAX_SEARCHED", 3)
    traces = Traces()
    running = begun(traces, 0)
    kept = [begun(traces, number) for number in range(1, 7)]
    for trace in kept:
        ended(traces, trace)
    assert Selection(100).of(traces.searched(None)) == [*reversed(kept[3:]), running]
    assert list(traces.latest(None)) == [running, *reversed(kept[3:])]
    assert traces.find(kept[0].request_id, None) is kept[0], "by its id, though no list has it"
