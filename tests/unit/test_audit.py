"""The audit log: a line for each request, and no words of it."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from prometheus_client import CollectorRegistry

from baton.process.options import ConfigError
from baton.router.api.audit import AuditLog, AuditRecord
from baton.router.api.authentication import Authentication
from baton.router.api.grpc.front import interceptors_for
from baton.router.api.grpc.service import add_services
from baton.router.api.http.app import app_for
from baton.router.api.http.server.quiet import FOLLOWED, FOLLOWS_S, MAX_LOOKS, Quiet
from baton.router.api.service import CompletionService
from baton.router.api.settings import ApiSettings
from baton.router.api.strangers import MAX_ADDRESSES
from baton.router.dispatch.ledger import LedgerEntry
from baton.router.dispatch.types import RingError
from baton.router.security.client import Client
from baton.router.shared.limits import Tenant
from baton.router.ui.history import History
from baton.telemetry.admission import AdmissionMetrics
from baton.telemetry.audit import AuditMetrics
from baton.telemetry.metrics import RouterMetrics
from baton.text.tokenizer import Tokenizer
from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc, worker_pb2
from tests.support.api_server import serving_app, until
from tests.support.fake_ring import FakeRing
from tests.support.tiny_tokenizers import byte_level_tokenizer

SECRET = "the fox"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture
def ring() -> FakeRing:
    return FakeRing(lambda call: [10, 11, 12], cached_tokens=2)


def service_of(ring: FakeRing, tokenizer: Tokenizer, audit: AuditLog) -> CompletionService:
    clients = {"k": Client(tenant=Tenant("acme"), key="ci")}
    metrics = RouterMetrics(CollectorRegistry())
    authentication = Authentication(clients.get, Tenant())
    return CompletionService(
        ring, tokenizer, ApiSettings(), metrics, authentication=authentication, audit=audit
    )


@asynccontextmanager
async def serving(
    ring: FakeRing, tokenizer: Tokenizer, path: Path, *, prompts: bool = False
) -> AsyncIterator[httpx.AsyncClient]:
    async with serving_log(ring, tokenizer, AuditLog(str(path), prompts=prompts)) as client:
        yield client


@asynccontextmanager
async def serving_log(
    ring: FakeRing, tokenizer: Tokenizer, audit: AuditLog
) -> AsyncIterator[httpx.AsyncClient]:
    app = app_for(service_of(ring, tokenizer, audit))
    headers = {"x-api-key": "k"}
    async with (
        serving_app(app) as url,
        httpx.AsyncClient(base_url=url, timeout=30, headers=headers) as client,
    ):
        yield client
    audit.close()


def of_acme(audit: AuditLog, request_id: str) -> AuditRecord:
    record = audit.begin(request_id)
    record.client = Client(tenant=Tenant("acme"))
    return record


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_each_request_has_its_line(
    ring: FakeRing, tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "baton")
    path = tmp_path / "audit"
    body = {"prompt": SECRET, "max_tokens": 4}
    async with serving(ring, tokenizer, path) as client:
        answered = await client.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
        assert answered.status_code == 200
        assert (await client.post("/v1/completions", json={**body, "stream": True})).status_code == 200
        assert (await client.post("/v1/completions", json={**body, "max_tokens": -1})).status_code == 400
        assert (
            await client.post("/v1/completions", json=body, headers={"x-api-key": "no"})
        ).status_code == 401
        assert (await client.get("/health")).status_code == 200
    whole, streamed, bad, stranger = lines(path)
    usage = answered.json()["usage"]
    assert whole == whole | {
        "client_request_id": "mine",
        "tenant": "acme",
        "key": "ci",
        "model": "tiny",
        "endpoint": "/v1/completions",
        "status": 200,
        "outcome": "completed",
        "prompt_tokens": usage["prompt_tokens"],
        "completion_tokens": 4,
        "cached_tokens": 2,
        "attempts": 1,
    }
    assert answered.json()["id"].endswith(whole["request_id"]) and whole["ms"] > 0 and "T" in whole["time"]
    assert streamed["outcome"] == "completed" and streamed["completion_tokens"] == 4
    assert (bad["status"], bad["outcome"], bad["tenant"]) == (400, None, "acme")
    assert (stranger["status"], stranger["tenant"], stranger["requests"]) == (401, None, 1)
    assert "fox" not in path.read_text() and "fox" not in caplog.text
    assert path.stat().st_mode & 0o077 == 0, "nobody else may read it"


async def test_of_the_live_page_only_refusals_are_told(
    ring: FakeRing, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    clients = {
        "k": Client(tenant=Tenant("acme"), key="ci"),
        "op": Client(tenant=Tenant("root"), key="page", operator=True),
    }
    audit = AuditLog(str(tmp_path / "audit"))
    service = service_of(ring, tokenizer, audit)
    service.authentication = Authentication(clients.get, Tenant())
    history = History(service.metrics, [], AdmissionMetrics(CollectorRegistry()))
    async with serving_app(app_for(service, history=history)) as url, httpx.AsyncClient(base_url=url) as http:
        for key in ("op", "stranger", "k", "op"):
            await http.get("/ui/data", headers={"x-api-key": key})
        await http.get("/ui/data?after=soon", headers={"x-api-key": "k"})
        assert (await http.get("/ui")).status_code == 200
        for path in ("/debug/requests", "/debug/requests?limit=2", "/debug/requests?limit=x"):
            await http.get(path, headers={"x-api-key": "op"})
    audit.close()
    told = [(line["endpoint"], line["status"], line["tenant"]) for line in lines(tmp_path / "audit")]
    # Strangers are told of when the second is over.
    assert told == [("/ui/data", 400, "acme"), ("/debug/requests", 400, "root"), ("other", 401, None)]


async def test_of_looks_at_a_request_the_first_is_told(
    ring: FakeRing, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async with serving(ring, tokenizer, tmp_path / "audit") as client:
        body = {"prompt": [5], "max_tokens": 2}
        made = [(await client.post("/v1/completions", json=body)).json()["id"] for _ in range(2)]
        for looked_at in (made[0], made[0], made[1], made[0], "nothing", "nothing"):
            await client.get(f"/debug/requests/{looked_at}")
    told = [line["status"] for line in lines(tmp_path / "audit") if line["endpoint"].startswith("/debug")]
    assert told == [200, 200, 404, 404]


def test_a_look_follows_one_of_the_same_client_shortly_before() -> None:
    now = 0.0
    quiet = Quiet(lambda: now)
    one, other = (Client(tenant=Tenant("acme"), key=key) for key in ("ci", "ops"))
    [route] = FOLLOWED
    assert not quiet.leaves_out(route, "/a", 200, one)
    now = FOLLOWS_S - 1
    assert quiet.leaves_out(route, "/a", 200, one) and not quiet.leaves_out(route, "/a", 200, other)
    now += FOLLOWS_S
    assert not quiet.leaves_out(route, "/a", 200, one), "somebody came back to it"
    for number in range(MAX_LOOKS):
        assert not quiet.leaves_out(route, f"/{number}", 200, one)
    assert not quiet.leaves_out(route, "/a", 200, one), "it is forgotten"


async def test_prompts_are_written_when_asked_for(
    ring: FakeRing, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async with serving(ring, tokenizer, tmp_path / "audit", prompts=True) as client:
        body = {"prompt": [SECRET, "other"], "max_tokens": 2}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
    [line] = lines(tmp_path / "audit")
    assert line["prompts"] == [SECRET, "other"]


async def test_how_an_answer_ended_is_told(ring: FakeRing, tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "audit"
    ring.delay = 0.02
    async with serving(ring, tokenizer, path) as client:
        body = {"prompt": [5], "max_tokens": 100, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            await anext(response.aiter_bytes())
        await until(lambda: len(path.read_text().splitlines()) == 1)
        ring.error, ring.fail_after = RingError(502, "worker_lost", "it died"), 2
        await client.post("/v1/completions", json=body)
    left, failed = lines(path)
    assert left["outcome"] == "cancelled" and 0 < left["completion_tokens"] < 100
    assert failed["outcome"] == "worker_lost" and failed["status"] == 200, "it had begun to stream"


async def test_grpc_has_lines_too(ring: FakeRing, tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "audit"
    audit = AuditLog(str(path))
    service = service_of(ring, tokenizer, audit)
    server = grpc.aio.server(interceptors=interceptors_for(service))
    add_services(server, service)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    asked = pb.GenerateRequest(text=SECRET, params=pb.SamplingParams(max_tokens=2))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        assert [r async for r in stub.Generate(asked, metadata=(("x-api-key", "k"),))]
        for _ in range(20):
            with pytest.raises(grpc.aio.AioRpcError):
                _ = [r async for r in stub.Generate(asked)]
    await server.stop(0)
    audit.close()
    known, stranger = lines(path)
    assert (known["tenant"], known["status"], known["completion_tokens"]) == ("acme", 200, 2)
    assert (stranger["tenant"], stranger["status"], stranger["requests"]) == (None, 401, 20)
    assert stranger["address"] == "127.0.0.1"


async def test_a_file_that_was_moved_away_is_opened_again(
    ring: FakeRing, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "audit"
    async with serving(ring, tokenizer, path) as client:
        await client.get("/v1/models")
        await asyncio.to_thread(path.rename, tmp_path / "audit.1")
        await client.get("/v1/models")
    assert len(lines(path)) == len(lines(tmp_path / "audit.1")) == 1


async def test_answers_go_on_when_the_file_cannot_be_opened_again(
    ring: FakeRing, tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    async with serving(ring, tokenizer, folder / "audit") as client:
        await client.get("/v1/models")
        folder.rename(tmp_path / "moved")
        for _ in range(2):
            assert (await client.get("/v1/models")).status_code == 200
        (tmp_path / "moved").rename(folder)
        await client.get("/v1/models")
    before, gap, after = lines(folder / "audit")
    assert before["status"] == after["status"] == 200
    assert gap == {"time": gap["time"], "lost_lines": 2}
    assert caplog.text.count("the audit log cannot be written") == 1
    assert caplog.text.count("can be written again: 2 lines were lost") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
async def test_a_full_disk_loses_lines_and_tells_no_prompt(
    ring: FakeRing,
    tokenizer: Tokenizer,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    registry = CollectorRegistry()
    audit = AuditLog("/dev/full", prompts=True, metrics=AuditMetrics(registry))
    async with serving_log(ring, tokenizer, audit) as client:
        body = {"prompt": SECRET, "max_tokens": 2}
        for _ in range(3):
            assert (await client.post("/v1/completions", json=body)).status_code == 200
        assert (await client.get("/health")).status_code == 200
    told = capfd.readouterr()
    assert "fox" not in told.out + told.err + caplog.text
    assert caplog.text.count("the audit log cannot be written, lines are lost: No space left") == 1
    assert registry.get_sample_value("baton_audit_lines_lost_total") == 3
    assert registry.get_sample_value("baton_audit_log_up") == 0


async def test_the_log_recovers_though_no_request_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("baton.router.api.audit.BEAT_S", 0.01)
    registry = CollectorRegistry()
    audit = AuditLog(str(tmp_path / "audit"), metrics=AuditMetrics(registry))
    following = asyncio.create_task(audit.run())
    full = Full(monkeypatch)
    audit.end(of_acme(audit, "a"))
    await asyncio.sleep(0.1)
    assert registry.get_sample_value("baton_audit_log_up") == 0
    full.over()
    await until(lambda: registry.get_sample_value("baton_audit_log_up") == 1)
    audit.end(of_acme(audit, "b"))
    following.cancel()
    gap, line = lines(tmp_path / "audit")
    assert gap["lost_lines"] == 1 and line["request_id"] == "b"
    assert registry.get_sample_value("baton_audit_lines_lost_total") == 1
    assert caplog.text.count("lines are lost") == caplog.text.count("1 lines were lost") == 1


async def test_half_a_line_does_not_take_the_next_one_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit = AuditLog(str(tmp_path / "audit"))
    audit.end(of_acme(audit, "a"))
    full = Full(monkeypatch, after=20)
    audit.end(of_acme(audit, "b"))
    full.over()
    audit.end(of_acme(audit, "c"))
    first, torn, gap, last = (tmp_path / "audit").read_text().splitlines()
    assert json.loads(first)["request_id"] == "a" and json.loads(last)["request_id"] == "c"
    assert len(torn) == 20 and json.loads(gap)["lost_lines"] == 1


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/completions", 503),
        ("/v1/messages", 529),  # as Anthropic's API has it
        ("/v1/responses", 503),
        ("/v1/models", 503),
    ],
)
async def test_where_the_log_is_a_duty_nothing_is_answered_without_it(
    ring: FakeRing,
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    status: int,
) -> None:
    audit = AuditLog(str(tmp_path / "audit"), required=True)
    async with serving_log(ring, tokenizer, audit) as client:
        assert (await client.get("/v1/models")).status_code == 200
        full = Full(monkeypatch)
        assert (await client.get("/v1/models")).status_code == 200, "nobody knew"
        for _ in range(2):
            refused = await client.request("GET" if path == "/v1/models" else "POST", path, json={})
            assert refused.status_code == status and "retry-after" in refused.headers
            assert "audit log" in refused.json()["error"]["message"]
        assert (await client.get("/health")).status_code == 503
        assert (await client.get("/metrics")).status_code == 200
        full.over()
        assert (await client.get("/v1/models")).status_code == 503, "whose line is the first that is written"
        assert (await client.get("/v1/models")).status_code == 200
        assert (await client.get("/health")).status_code == 200
    told = [line.get("lost_lines", line.get("status")) for line in lines(tmp_path / "audit")]
    assert told == [200, 3, 503, 200]


async def test_where_the_log_is_a_duty_grpc_is_refused_too(
    ring: FakeRing, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = grpc.aio.server()
    audit = AuditLog(str(tmp_path / "audit"), required=True)
    add_services(server, service_of(ring, tokenizer, audit))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    Full(monkeypatch)
    audit.end(of_acme(audit, "a"))
    asked = pb.GenerateRequest(text=SECRET, params=pb.SamplingParams(max_tokens=2))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            _ = [r async for r in stub.Generate(asked, metadata=(("x-api-key", "k"),))]
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    await server.stop(0)


class Full:
    """The disk has no room, after some bytes more, until it is ``over``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, after: int = 0) -> None:
        self._write, self._room, self._over = os.write, after, False
        monkeypatch.setattr("baton.router.api.audit.os.write", self.write)

    def write(self, descriptor: int, data: bytes | memoryview) -> int:
        if self._over:
            return self._write(descriptor, data)
        if not self._room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written, self._room = self._write(descriptor, bytes(data)[: self._room]), 0
        return written

    def over(self) -> None:
        self._over = True


@pytest.mark.deep
async def test_strangers_have_a_line_for_each_second_and_address(
    ring: FakeRing, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "audit"
    async with serving(ring, tokenizer, path) as client:
        for _ in range(100):
            await client.post("/v1/completions", headers={"x-api-key": "no", "x-request-id": "r" * 128})
        assert not lines(path)
    [told] = lines(path)
    assert told == {
        "time": told["time"],
        "request_id": told["request_id"],
        "tenant": None,
        "address": "127.0.0.1",
        "requests": 100,
        "endpoint": "other",
        "status": 401,
    }
    assert path.stat().st_size < 300


def test_lines_about_strangers_are_bounded_whatever_their_addresses(tmp_path: Path) -> None:
    audit = AuditLog(str(tmp_path / "audit"))
    for number in range(10_000):
        record = audit.begin("r", address=f"10.0.{number // 256}.{number % 256}")
        audit.end(record)
    audit.tell_strangers()
    told = lines(tmp_path / "audit")
    assert len(told) == MAX_ADDRESSES + 1
    assert sum(line["requests"] for line in told) == 10_000
    assert told[-1]["address"] is None
    audit.tell_strangers()
    assert lines(tmp_path / "audit") == told


async def test_a_line_about_strangers_that_is_lost_stops_nobody(
    ring: FakeRing, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = CollectorRegistry()
    audit = AuditLog(str(tmp_path / "audit"), required=True, metrics=AuditMetrics(registry))
    async with serving_log(ring, tokenizer, audit) as client:
        full = Full(monkeypatch)
        assert (await client.get("/v1/models", headers={"x-api-key": "no"})).status_code == 401
        audit.tell_strangers()
        assert registry.get_sample_value("baton_audit_lines_lost_total") == 1
        assert (await client.get("/health")).status_code == 200
        audit.check()
        full.over()
        assert (await client.get("/v1/models")).status_code == 200
    gap, known = lines(tmp_path / "audit")
    assert gap["lost_lines"] == 1 and known["tenant"] == "acme"


async def test_while_the_log_is_a_duty_that_fails_a_stranger_hears_only_that_a_key_is_needed(
    ring: FakeRing, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit = AuditLog(str(tmp_path / "audit"), required=True)
    async with serving_log(ring, tokenizer, audit) as client:
        Full(monkeypatch)
        assert (await client.get("/v1/models")).status_code == 200
        assert (await client.get("/v1/models")).status_code == 503
        assert (await client.get("/v1/models", headers={"x-api-key": "no"})).status_code == 401


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--audit-log"):
        AuditLog(str(tmp_path / "none" / "audit"))


def test_chunks_tell_their_attempt() -> None:
    chunk = LedgerEntry(attempt=2).accept(worker_pb2.TokenDelta(attempt=2, token_ids=[5]))
    assert not isinstance(chunk, RingError) and chunk is not None and chunk.attempt == 2
