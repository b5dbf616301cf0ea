"""Where a request's time went, on rings of real processes: told by the router, and by ``baton explain``."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.ring import Ring, running_ring

WITHIN = 0.02
"""Of what a client measured."""
TRIES = 5
"""A measurement from outside is disturbed by whatever else the machine does: one of these is not."""


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    with running_ring(tmp_path_factory.mktemp("traces"), prefill_options=("--prefill-chunk", "64")) as ring:
        yield ring


def told(ring: Ring, request_id: str) -> Any:
    with urllib.request.urlopen(f"{ring.url}/debug/requests/{request_id}", timeout=10) as response:
        return json.load(response)


def stream(ring: Ring, prompt: list[int], max_tokens: int) -> tuple[str, float, float]:
    """The answer's id, and milliseconds until its first token and its end as the client has them."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    with httpx.Client(base_url=ring.url, timeout=60) as client:
        client.get("/version")  # connected
        began, first, name = time.perf_counter(), 0.0, ""
        with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, response.read()
            name = response.headers["x-baton-request-id"]
            for line in response.iter_lines():
                if line.startswith("data: {") and not first:
                    first = time.perf_counter()
        return name, 1e3 * (first - began), 1e3 * (time.perf_counter() - began)


def test_phases_sum_to_what_a_client_measures(ring: Ring) -> None:
    off = []
    for attempt in range(TRIES):
        prompt = [(7 * i + attempt) % 200 + 3 for i in range(900)]
        name, ttft_ms, e2e_ms = stream(ring, prompt, 48)
        [choice] = told(ring, name)["choices"]
        phases = choice["phases"]
        before = sum(p["ms"] for p in phases if p["start_ms"] < choice["ttft_ms"] - 0.01)
        whole = sum(p["ms"] for p in phases)
        off.append((abs(before / ttft_ms - 1), abs(whole / e2e_ms - 1)))
        assert before == pytest.approx(choice["ttft_ms"], abs=0.02)
        print(ttft_ms, e2e_ms, before, whole, phases)
        if max(off[-1]) <= WITHIN:
            return
    raise AssertionError(off)
