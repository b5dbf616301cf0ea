"""Where a request's time went, on a ring of real processes: told by the router, by ``baton explain``, and as
spans to a collector."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import closing
from http.client import HTTPConnection
from typing import Any

import pytest

from tests.support.otlp import Spans, collector
from tests.support.ring import Ring, running_ring

WITHIN = 0.02
"""Of what a client measured."""
TRIES = 8
"""A measurement from outside is disturbed by whatever else the machine does: one of these is not."""
PHASES = {
    *(f"route.{name}" for name in ("read", "limits", "queue", "place")),
    *(f"prefill.{name}" for name in ("network", "link", "room", "queue", "compute", "publish")),
    "deliver",
    *(f"handoff.{name}" for name in ("flush", "commit")),
    *(f"decode.{name}" for name in ("queue", "first_step", "publish", "steps")),
    "finish",
}
"""Of a request that was handed on; what is left for the network between prefill and decode may be nothing."""
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(scope="module")
def spans() -> Iterator[tuple[str, Spans]]:
    with collector() as found:
        yield found


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory, spans: tuple[str, Spans]) -> Iterator[Ring]:
    tmp = tmp_path_factory.mktemp("traces")
    with running_ring(tmp, router_options=("--otlp-endpoint", spans[0], "--trace-sample", "0")) as ring:
        stream(ring, prompt(0), 4)  # whatever is slower the first time
        yield ring


def prompt(number: int) -> list[int]:
    return [(7 * i + number) % 200 + 3 for i in range(1800)]


def told(ring: Ring, request_id: str) -> Any:
    with urllib.request.urlopen(f"{ring.url}/debug/requests/{request_id}", timeout=60) as response:
        return json.load(response)


def stream(
    ring: Ring, prompt: list[int], max_tokens: int, traceparent: str | None = None
) -> tuple[Mapping[str, str], float, float]:
    """The answer's headers, and milliseconds until its first token and its end as the client has them: one
    that does as little as may be."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    headers = {"content-type": "application/json"} | ({"traceparent": traceparent} if traceparent else {})
    sent = json.dumps(body)
    connection = HTTPConnection(ring.url.removeprefix("http://"), timeout=60)
    with closing(connection):
        connection.connect()
        began = time.perf_counter()
        connection.request("POST", "/v1/completions", sent, headers)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        assert response.readline().startswith(b"data: {")
        first = time.perf_counter()
        response.read()
        return dict(response.headers), 1e3 * (first - began), 1e3 * (time.perf_counter() - began)


def test_phases_sum_to_what_a_client_measures(ring: Ring) -> None:
    off = []
    for number in range(1, TRIES):
        headers, ttft_ms, e2e_ms = stream(ring, prompt(number), 64)
        [choice] = told(ring, headers["x-baton-request-id"])["choices"]
        phases = choice["phases"]
        missing = PHASES - {phase["name"] for phase in phases}
        before = sum(p["ms"] for p in phases if p["start_ms"] < choice["ttft_ms"] - 0.01)
        assert before == pytest.approx(choice["ttft_ms"], abs=0.05)
        off.append((abs(before / ttft_ms - 1), abs(sum(p["ms"] for p in phases) / e2e_ms - 1)))
        if max(off[-1]) <= WITHIN and not missing:
            print(f"TTFT {ttft_ms:.1f} ms off by {off[-1][0]:.2%}, E2E {e2e_ms:.1f} ms by {off[-1][1]:.2%}")
            return
    raise AssertionError(f"{off}, the last without {missing}")


def test_explain_prints_the_same(ring: Ring) -> None:
    headers, _, _ = stream(ring, prompt(20), 8)
    document = told(ring, headers["x-baton-request-id"])
    argv = [sys.executable, "-m", "baton", "explain", document["request_id"], "--url", ring.url]
    said = subprocess.run(argv, capture_output=True, text=True, timeout=240)
    assert said.returncode == 0, said.stderr
    [choice] = document["choices"]
    for phase in choice["phases"]:
        assert f"{phase['ms']:.3f} ms  {phase['name']} " in said.stdout, said.stdout
    [attempt] = choice["attempts"]
    assert f"at {attempt['prefill']} > {attempt['decode']}" in said.stdout
    assert "-- first token" in said.stdout and "handoff over " in said.stdout and "chosen" in said.stdout
    unknown = subprocess.run([*argv[:4], "nobody", *argv[5:]], capture_output=True, text=True, timeout=240)
    assert unknown.returncode == 1 and "Nothing is known of request" in unknown.stderr


def test_a_collector_gets_the_spans_of_those_that_are_sampled(ring: Ring, spans: tuple[str, Spans]) -> None:
    unsampled, _, _ = stream(ring, prompt(30), 4)
    headers, _, _ = stream(ring, prompt(31), 16, PARENT)
    _, trace_id, span_id, flags = headers["traceresponse"].split("-")
    assert trace_id == PARENT.split("-")[1] and flags == "01"
    assert unsampled["traceresponse"].endswith("-00")
    deadline = time.monotonic() + 120
    while not (found := spans[1].of(trace_id)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not spans[1].of(unsampled["traceresponse"].split("-")[1])
    service, root = found["POST /v1/completions"]
    assert service == "baton-router"
    assert (root.span_id.hex(), root.parent_span_id.hex()) == (span_id, PARENT.split("-")[2])
    [choice] = told(ring, headers["x-baton-request-id"])["choices"]
    for phase in choice["phases"]:
        _, span = found[phase["name"]]
        assert (span.end_time_unix_nano - span.start_time_unix_nano) / 1e6 == pytest.approx(
            phase["ms"], abs=0.01
        )
    by_id = {span.span_id: span for _, span in found.values()}
    for _, span in found.values():
        if span is not root:
            above = by_id[span.parent_span_id]
            assert above.start_time_unix_nano <= span.start_time_unix_nano + 1000
            assert span.end_time_unix_nano <= above.end_time_unix_nano + 1000
    services = {name: found[name][0] for name in ("prefill", "handoff", "decode", "prefill.compute")}
    assert services == {
        "prefill": "baton-prefill",
        "handoff": "baton-decode",
        "decode": "baton-decode",
        "prefill.compute": "baton-prefill",
    }
