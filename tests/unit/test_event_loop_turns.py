"""Whatever a client sends, the router's event loop goes on within 50 ms, and its memory stays bounded."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
import pytest

from baton.router.api.reading import INLINE_BYTES
from tests.support.deep import all_deep_but
from tests.support.large_bodies import ENDPOINTS, bodies
from tests.support.tiny_tokenizers import byte_level_tokenizer

MAX_TURN_S = 0.05
MAX_MEMORY = 400 << 20
TRIES = 3
"""A machine that is busy with other things may lengthen a turn, even in CPU time, but not each time."""


class Told(msgspec.Struct):
    max_s: float
    memory: int


class Server:
    """See `tests.support.turns_server`."""

    def __init__(self, client: httpx.Client, pid: int) -> None:
        self._client = client
        self.pid = pid

    def turns(self) -> Told:
        """Since it was asked last."""
        return msgspec.json.decode(self._client.get("/turns").content, type=Told)

    def post(self, endpoint: str, body: bytes) -> httpx.Response:
        return self._client.post(endpoint, content=body, headers={"content-type": "application/json"})

    def max_s(self, endpoint: str, body: bytes) -> float:
        """The longest turn while ``body`` is answered."""
        self.turns()
        assert self.post(endpoint, body).status_code in (200, 400, 404)
        return self.turns().max_s


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("model")
    byte_level_tokenizer(directory)
    with _serving(directory) as server:
        yield server


@contextmanager
def _serving(directory: Path) -> Iterator[Server]:
    program = [sys.executable, "-m", "tests.support.turns_server", str(directory)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        with httpx.Client(base_url=url, timeout=120) as client:
            yield Server(client, process.pid)
        process.kill()


@pytest.mark.deep
@pytest.mark.parametrize("endpoint", all_deep_but(1, ENDPOINTS))
def test_no_body_holds_up_the_event_loop(server: Server, endpoint: str) -> None:
    slow: dict[str, float] = {}
    for name, body in bodies(endpoint):
        took = min(_until_fast(server, endpoint, body))
        if took > MAX_TURN_S:
            slow[name] = took
    assert not slow
    assert server.turns().memory < MAX_MEMORY


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_no_body_that_is_read_on_the_event_loop_takes_long(server: Server, endpoint: str) -> None:
    slow: dict[str, float] = {}
    for name, body in bodies(endpoint, INLINE_BYTES):
        took = min(_until_fast(server, endpoint, body))
        if took > MAX_TURN_S:
            slow[name] = took
    assert not slow


def _until_fast(server: Server, endpoint: str, body: bytes) -> Iterator[float]:
    for _ in range(TRIES):
        took = server.max_s(endpoint, body)
        yield took
        if took <= MAX_TURN_S:
            return


@pytest.mark.parametrize("endpoint", all_deep_but(1, ["/v1/chat/completions", "/tokenize"]))
def test_no_template_holds_up_the_event_loop(tmp_path: Path, endpoint: str) -> None:
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    byte_level_tokenizer(tmp_path, template=loop)
    with _serving(tmp_path) as server:
        answer = server.post(endpoint, b'{"messages": [{"role": "user", "content": "hi"}]}')
        assert answer.status_code == 400
        assert "chat template takes more than" in answer.json()["error"]["message"]
        assert server.turns().max_s < MAX_TURN_S


@pytest.mark.deep
def test_the_processes_end_with_the_router(tmp_path: Path) -> None:
    byte_level_tokenizer(tmp_path)
    program = [sys.executable, "-m", "tests.support.turns_server", str(tmp_path)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        with httpx.Client(base_url=url, timeout=60) as client:
            client.post("/tokenize", json={"prompt": "a" * 100_000}).raise_for_status()
        [child] = _children(process.pid)
        process.kill()
    assert _gone(child)


def _children(pid: int) -> list[int]:
    told = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return [int(child) for child in told.split()]


def _gone(pid: int) -> bool:
    """Whether the process ends within a few seconds."""
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists():
            return True
        time.sleep(0.05)
    return False
