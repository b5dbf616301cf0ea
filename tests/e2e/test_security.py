"""Keys, mTLS between all services, TLS of KV blocks and the audit log, in a ring of real processes."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from baton.router.security.keys import entry_line, new_key
from tests.support.certificates import Authority
from tests.support.ring import Ring, running, running_ring, worker

pytestmark = pytest.mark.beside

ALICE, BOB = new_key(), new_key()
PROMPT = "Baton is a server for large language models, and this is a prompt of some length. " * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("security")


@pytest.fixture(scope="module")
def tls(folder: Path) -> tuple[str, ...]:
    files = Authority.new(folder).files("service", hosts="DNS:baton.internal")
    return (
        *("--worker-tls-certfile", files.certificate, "--worker-tls-keyfile", files.key),
        *("--worker-tls-ca-certs", str(files.ca), "--worker-tls-server-name", "baton.internal"),
    )


@pytest.fixture(scope="module")
def ring(folder: Path, tls: tuple[str, ...]) -> Iterator[Ring]:
    """Decode has two ranks."""
    keys = folder / "keys.yaml"
    keys.write_text("\n".join(["keys:", entry_line(ALICE, "alice", "a"), entry_line(BOB, "bob", "b")]))
    router = [*tls, "--api-keys", str(keys), "--audit-log", str(folder / "audit")]
    split = ("--tensor-parallel-size", "2")
    with running_ring(folder / "ring", options=tls, decode_options=split, router_options=router) as started:
        yield started


async def ask(client: httpx.AsyncClient, key: str) -> httpx.Response:
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    return await client.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})


def generate(url: str, key: str) -> subprocess.CompletedProcess[str]:
    """What the command line says."""
    command = [sys.executable, "-m", "baton", "generate", "hello", "--url", url, "--max-tokens", "3"]
    environment = {**os.environ, "OPENAI_API_KEY": key}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


async def test_tenants_are_answered_apart_over_mtls(ring: Ring, folder: Path) -> None:
    async with httpx.AsyncClient(base_url=ring.url, timeout=60) as client:
        cached = []
        for key in (ALICE, ALICE, BOB):
            response = await ask(client, key)
            assert response.status_code == 200, response.text
            cached.append(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert cached[0] == cached[2] == 0 < cached[1]
        assert (await ask(client, new_key())).status_code == 401
    said = await asyncio.to_thread(generate, ring.url, BOB)
    assert said.returncode == 0 and said.stdout.strip(), said.stderr
    handed_on = sum(
        v for k, v in ring.of_role("decode")[0].metrics().items() if k.startswith("baton_handoff")
    )
    assert handed_on > 0
    lines = [json.loads(line) for line in (folder / "audit").read_text().splitlines()]
    assert [(line["tenant"], line["status"]) for line in lines] == [
        ("a", 200), ("a", 200), ("b", 200), (None, 401), ("b", 200), ("b", 200)
    ]  # fmt: skip
    logs = "".join(path.read_text() for path in (folder / "ring").glob("*.log"))
    assert ALICE not in logs and "large language" not in logs + str(lines)


def test_kv_blocks_travel_under_tls(ring: Ring) -> None:
    """To each rank. Whoever comes to a data port without is sent away."""
    for each in ring.workers:
        assert "KV blocks travel under TLS 1.3 (connector tcp)" in each.log.read_text()
    [decode] = ring.of_role("decode")
    [rank] = psutil.Process(decode.process.pid).children()
    prefill = psutil.Process(ring.of_role("prefill")[0].process.pid)
    linked = {c.raddr.port for c in prefill.net_connections("tcp") if c.status == psutil.CONN_ESTABLISHED}
    listening = {c.laddr.port for c in rank.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    [port] = listening & linked
    with socket.create_connection(("127.0.0.1", port), 10) as stranger:
        stranger.sendall(b"baton-tcp-1\n" + bytes(32))
        with suppress(ConnectionResetError):
            while stranger.recv(1 << 10):
                pass
    assert "it speaks no TLS: does its worker have --worker-tls-certfile?" in decode.log.read_text()


def test_a_connector_that_does_not_encrypt_is_warned_of(tmp_path: Path, tls: tuple[str, ...]) -> None:
    chosen = worker(tmp_path, "gloo", "decode", "demo", *tls, "--connector", "gloo")
    with running([chosen]):
        said = chosen.log.read_text()
    assert "WARNING" in said
    assert "--connector gloo does not encrypt KV blocks, in spite of --worker-tls-certfile" in said


@pytest.mark.deep
async def test_a_key_that_is_taken_out_of_the_file_ends(ring: Ring, folder: Path) -> None:
    (folder / "new").write_text(f"keys:\n{entry_line(BOB, 'bob', 'b')}")
    (folder / "new").rename(folder / "keys.yaml")
    async with httpx.AsyncClient(base_url=ring.url, timeout=60) as client:
        for _ in range(50):
            if (await ask(client, ALICE)).status_code == 401:
                break
            await asyncio.sleep(0.2)
        assert (await ask(client, ALICE)).status_code == 401
        assert (await ask(client, BOB)).status_code == 200
