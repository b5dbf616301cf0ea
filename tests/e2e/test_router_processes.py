"""A router of several processes, to its clients and operators one."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.process import ready
from baton.v1 import inference_pb2, inference_pb2_grpc
from tests.support.ring import Ring, running, running_routers, simulated

pytestmark = pytest.mark.beside

PROCESSES = 3
ASKED = 30
LONG = 60


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[Ring]:
    (tmp_path / "profile.json").write_text('{"step_base_ms": 10}')
    workers = [simulated(tmp_path, "worker", "both", "--profile", str(tmp_path / "profile.json"))]
    groups = {"router": workers}
    with running(workers), running_routers(tmp_path, "demo", groups, processes=PROCESSES) as rings:
        yield rings["router"]


def get(ring: Ring, path: str) -> dict[str, object]:
    """What the ring tells; nothing while one of its processes is too slow to say what it knows."""
    try:
        with urllib.request.urlopen(ring.url + path, timeout=60) as answer:
            told: dict[str, object] = json.load(answer)
            return told
    except urllib.error.HTTPError as error:
        assert error.code == 503
        return {}


def ask(ring: Ring) -> str:
    """One request on a connection of its own; its id."""
    body = json.dumps({"model": "demo", "prompt": "of any process", "max_tokens": 3, "ignore_eos": True})
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{ring.url}/v1/completions", body.encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 3
        request_id: str = answer.headers["x-baton-request-id"]
        return request_id


def answered(ring: Ring) -> dict[str, float]:
    """Choices of each process, by its index."""
    with urllib.request.urlopen(f"{ring.url}/metrics", timeout=60) as answer:
        page = answer.read().decode()
    assert page.count("# TYPE baton_choices_total counter") == 1
    found: defaultdict[str, float] = defaultdict(float)
    for labels, value in re.findall(r"^baton_choices_total\{(.*)\} (\S+)$", page, re.MULTILINE):
        process = re.search(r'process="(\d)"', labels)
        assert process is not None
        found[process[1]] += float(value)
    return dict(found)


def stream_into(ring: Ring, events: list[dict[str, Any]]) -> None:
    """One answer of LONG tokens; each event when it comes."""
    body = {"model": "demo", "prompt": "on and on", "max_tokens": LONG, "ignore_eos": True}
    asked = json.dumps(body | {"stream": True, "return_token_ids": True}).encode()
    request = urllib.request.Request(
        f"{ring.url}/v1/completions", asked, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as lines:
        for line in lines:
            if line.startswith(b"data: {"):
                events.append(json.loads(line[6:]))


def interrupt_group(parent: int, others: list[int]) -> None:
    """As a terminal's Ctrl-C does: all that are in the parent's process group hear it."""
    group = os.getpgid(parent)
    for pid in (parent, *others):
        if os.getpgid(pid) == group:
            os.kill(pid, signal.SIGINT)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def children(ring: Ring) -> list[int]:
    parent = ring.router.process.pid
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def test_processes_are_one_router_to_whoever_asks(ring: Ring) -> None:
    ids = [ask(ring) for _ in range(ASKED)]
    until(lambda: sum(answered(ring).values()) == ASKED)
    until(lambda: len(answered(ring)) > 1)  # connections go to several processes
    for request_id in ids[:5]:  # asked of any process
        path = f"/debug/requests/{request_id}"
        until(lambda path=path: get(ring, path).get("outcome") == "completed")  # type: ignore[misc]
    listed: list[dict[str, str]] = []

    def all_listed() -> bool:
        listed[:] = get(ring, f"/debug/requests?limit={ASKED}")["requests"]  # type: ignore[call-overload]
        return {each["request_id"].removeprefix("cmpl-") for each in listed} == set(ids)

    until(all_listed)
    arrived = [each["arrived"] for each in listed]
    assert arrived == sorted(arrived, reverse=True), "the latest first"
    until(lambda: get(ring, "/ui/data")["answers"] == ASKED)

    assert isinstance(ring.router.ready, ready.RouterReady) and ring.router.ready.grpc is not None
    with grpc.insecure_channel(ring.router.ready.grpc) as channel:
        asked = inference_pb2.GenerateRequest(model="demo", text="and over gRPC")
        asked.params.max_tokens = 2
        frames = list(inference_pb2_grpc.InferenceStub(channel).Generate(asked, timeout=60))
    assert frames

    argv = (*ring.router.argv, "--port", ring.url.rpartition(":")[2])
    again = subprocess.run(
        [sys.executable, "-m", "baton", *argv], capture_output=True, text=True, timeout=120, check=False
    )
    assert again.returncode == 1 and "cannot listen on" in again.stderr, "the ports are this router's"


def test_a_process_that_dies_is_started_again_and_a_signal_ends_all(ring: Ring) -> None:
    before = children(ring)
    assert len(before) == PROCESSES
    os.kill(before[1], signal.SIGKILL)
    until(lambda: len(children(ring)) == PROCESSES and children(ring) != before)
    for _ in range(ASKED):  # none is lost, those included whose connections wait for the new process
        ask(ring)
    until(lambda: "ended by SIGKILL: it is started again" in ring.router.log.read_text())
    pids = children(ring)
    events: list[dict[str, Any]] = []
    stream = threading.Thread(target=stream_into, args=(ring, events))
    stream.start()
    until(lambda: bool(events))
    interrupt_group(ring.router.process.pid, pids)
    assert ring.router.process.wait(60) == 0
    stream.join()
    choices = [event["choices"][0] for event in events if "choices" in event]
    got = sum(len(choice["token_ids"]) for choice in choices)
    ended = f"{events[-3:]}\n{ring.router.log.read_text()[-5000:]}"
    assert got == LONG, f"a stream that was open did not come to its end: {ended}"
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
