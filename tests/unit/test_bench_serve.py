"""``baton bench serve`` against a server that streams on a known schedule, over real HTTP."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from pathlib import Path

import pytest

from baton.bench.config import ServeConfig, parse_url
from baton.bench.document import check_writable, write_document
from baton.bench.events import EventReader
from baton.bench.exchange import Prepared, RequestSender
from baton.bench.goals import Goals
from baton.bench.http import HttpClient
from baton.bench.load_generator import open_loop
from baton.bench.plots import plot_serve
from baton.bench.serve import ServeResult, measure
from baton.bench.target import RequestFormat
from baton.bench.workload.config import WorkloadConfig
from baton.process.options import ConfigError, UserError
from tests.support.api_server import serving_app
from tests.support.fake_openai import FakeServer
from tests.support.patience import undisturbed

TOLERANCE = 0.06
"""Seconds, on a machine that does other things as well."""


async def run(server: FakeServer, count: int = 1, **options: object) -> ServeResult:
    """Measure the server with ``count`` small requests."""
    load = WorkloadConfig(num_prompts=count, input_len=5, output_len=4)
    async with serving_app(server.app()) as url:
        return await measure(ServeConfig(workload=load, url=url, **options))  # type: ignore[arg-type]


@undisturbed
async def test_the_clock_is_that_of_the_chunks() -> None:
    server = FakeServer([(0.15, 1), (0.1, 1), (0.3, 3), (0.05, 1)])
    result = await run(server)
    [record] = result.records
    sent = server.calls[-1].chunks
    assert record.failure is None
    assert record.tokens_per_chunk_known
    assert [arrival.tokens for arrival in record.arrivals] == [1, 1, 3, 1]
    assert (record.prompt_tokens, record.output_tokens) == (77, 6)
    assert record.ttft >= 0.15
    assert record.ttft == pytest.approx(sent[0] - server.calls[-1].came, abs=TOLERANCE)
    gaps = [later - earlier for earlier, later in itertools.pairwise(sent)]
    expected = [gaps[0], *[gaps[1] / 3] * 3, gaps[2]]
    assert record.itl == pytest.approx(expected, abs=TOLERANCE)
    assert record.longest_gap == pytest.approx(gaps[1], abs=TOLERANCE)
    assert record.tpot == pytest.approx((sent[-1] - sent[0]) / 5, abs=TOLERANCE)
    assert record.e2e - record.ttft == pytest.approx(sent[-1] - sent[0], abs=TOLERANCE)


@undisturbed
async def test_a_server_that_takes_only_text_and_tells_no_ids() -> None:
    server = FakeServer([(0.0, 2), (0.1, 4)], token_ids=False, takes_ids=False)
    result = await run(server)
    [record] = result.records
    assert result.request == RequestFormat(
        model="demo", prompts="text", token_ids=False, ignore_eos=True, temperature=0
    )
    assert isinstance(server.calls[-1].body["prompt"], str)
    assert record.output_tokens == 6  # as its usage says: two chunks
    assert not result.summary.tokens_per_chunk_known
    assert record.tpot == pytest.approx(0.1 / 5, abs=TOLERANCE)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_events_are_whole_however_the_body_is_cut(size: int) -> None:
    body = b': hello\r\n\r\ndata: {"a": 1}\r\n\r\nevent: x\ndata:{"b": 2}\n\ndata: [DONE]\n\n'
    reader = EventReader()
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    found = [event for piece in pieces for event in reader.feed(piece)]
    assert found == [b'{"a": 1}', b'{"b": 2}', b"[DONE]"]


async def test_requests_say_what_is_wanted() -> None:
    server = FakeServer()
    await run(server, count=2)
    body = server.calls[-1].body
    assert body.pop("prompt")
    assert body.pop("seed") in (0, 1)
    assert body == {
        "model": "demo",
        "max_tokens": 4,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "ignore_eos": True,
    }


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ("refuse", "http_429", "429: too many"),
        ("event", "overloaded", "no room"),
        ("cut", "cut_off", "without"),
        ("empty", "empty", "no token"),
        ("hang", "timeout", "within 0.3 s"),
        ("garbage", "bad_event", "malformed"),
    ],
)
async def test_failures_are_counted_by_kind(fault: str, kind: str, message: str) -> None:
    result = await run(FakeServer(fault=fault), count=3, timeout=0.3, goals=Goals(ttft=1))
    assert result.summary.errors == {kind: 3}
    assert result.summary.completed == 0
    assert result.summary.goodput is not None
    assert result.summary.goodput.attainment == 0
    failure = result.records[0].failure
    assert failure is not None
    assert message in failure.message


async def test_without_usage_and_ids_nothing_is_counted() -> None:
    result = await run(FakeServer(token_ids=False, usage=False))
    assert result.summary.errors == {"no_usage": 1}


async def test_a_closed_loop_keeps_so_many_open() -> None:
    server = FakeServer([(0.02, 1), (0.02, 1)])
    result = await run(server, count=20, max_concurrency=3)
    assert result.summary.completed == 20
    assert server.max_open == 3
    assert [record.index for record in result.records] == list(range(20))


@undisturbed
async def test_an_open_loop_does_not_wait_for_answers() -> None:
    server = FakeServer([(0.5, 1)])
    result = await run(server, count=10, request_rate=100.0)
    assert server.max_open == 10
    assert result.summary.duration < 1.5


@undisturbed
async def test_send_times_are_kept_when_the_client_is_late() -> None:
    server = FakeServer()
    async with serving_app(server.app()) as url:
        client = HttpClient(parse_url("url", url))
        body = RequestFormat(model="m", prompts="text", token_ids=True, ignore_eos=True, temperature=0)
        requests = [Prepared(body.body("x", 1, 0), 1)] * 5
        exchange = RequestSender(client, timeout=5)
        running = asyncio.create_task(open_loop(exchange, requests, [0.05, 0.1, 0.2, 0.6, 0.7]))
        await asyncio.sleep(0)
        time.sleep(0.3)  # noqa: ASYNC251 - the loop is held up, as by a busy machine
        records = await running
        client.close()
    assert [record.failure for record in records] == [None] * 5
    late = [record.lateness for record in records]
    assert late[:3] == pytest.approx([0.25, 0.2, 0.1], abs=TOLERANCE)
    assert late[3:] == pytest.approx([0, 0], abs=TOLERANCE)
    assert [record.due for record in records] == [0.05, 0.1, 0.2, 0.6, 0.7]


async def test_what_is_open_at_the_end_is_given_up() -> None:
    server = FakeServer([(0.0, 1), (30.0, 1)])
    async with serving_app(server.app()) as url:
        client = HttpClient(parse_url("url", url))
        body = RequestFormat(model="m", prompts="text", token_ids=True, ignore_eos=True, temperature=0)
        exchange = RequestSender(client, timeout=60)
        [record] = await open_loop(exchange, [Prepared(body.body("x", 1, 0), 1)], [0.0], until=0.2)
    assert record.failure is not None
    assert record.failure.kind == "unfinished"
    assert len(record.arrivals) == 1


async def test_a_model_that_is_not_served() -> None:
    with pytest.raises(UserError, match="--model: the server does not serve 'gpt'; allowed: demo"):
        await run(FakeServer(), model="gpt")


async def test_results_are_written_and_drawn(tmp_path: Path) -> None:
    result = await run(FakeServer([(0.01, 1), (0.01, 2)]), count=4)
    write_document(
        tmp_path / "r.json", "serve", api_key="k", settings={"api_key": "k"}, records=result.records
    )
    document = json.loads((tmp_path / "r.json").read_text())
    assert document["versions"]["baton"]
    assert len(document["records"]) == 4
    assert "at" in document["records"][0]["arrivals"][0]
    assert document["settings"] == {}
    for name in ("r.svg", "r.png"):
        plot_serve(tmp_path / name, result.records, Goals(ttft=0.5), "a run")
    assert "<svg" in (tmp_path / "r.svg").read_text()
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_written_is_said_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--json: /proc/self/new"):
        check_writable("json", Path("/proc/self/new"))  # where not even root may
    kept, new = tmp_path / "kept", tmp_path / "new"
    kept.write_text("of the last run")
    check_writable("json", kept)
    check_writable("json", new)
    assert (kept.read_text(), new.exists()) == ("of the last run", False)
