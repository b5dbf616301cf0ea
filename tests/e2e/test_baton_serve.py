"""``baton serve demo`` with options as vLLM spells them: it answers who has the key, and ends with Ctrl-C."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.beside

OPTIONS = (
    *("--served-model-name", "toy", "glossary", "--max-model-len", "1k", "-tp", "1", "--dtype", "float"),
    *("--no-enable-prefix-caching", "--kv-cache-memory-bytes", "64M", "--max-num-seqs=4"),
    *("--api-key", "open sesame", "--port", "0", "--both", "1", "--threads-per-worker", "1"),
)


async def test_it_serves_the_demo_model(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as out:
        serve = subprocess.Popen(  # noqa: ASYNC220 (nothing else waits here)
            [sys.executable, "-m", "baton", "serve", "demo", *OPTIONS, "--grpc-port", "-1"],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )
    try:
        async with asyncio.timeout(120):
            while "serving; Ctrl-C" not in (said := log.read_text()):
                assert serve.poll() is None, said
                await asyncio.sleep(0.1)
        assert said.startswith("note: --grpc-port: ")
        assert "toy: 1 both + router, 1 CPU thread(s) per worker" in said
        url = re.search(r"ready on (http://127\.0\.0\.1:\d+); ask it", said)
        assert url is not None, said
        body = {"model": "glossary", "prompt": "Baton is", "max_tokens": 4, "temperature": 0}
        headers = {"Authorization": "Bearer open sesame"}
        async with httpx.AsyncClient(base_url=url[1], timeout=30) as client:
            assert (await client.post("/v1/completions", json=body)).status_code == 401
            answer = await client.post("/v1/completions", json=body, headers=headers)
            too_long = {**body, "prompt": [5] * 1000}
            refused = await client.post("/v1/completions", json=too_long, headers=headers)
        assert answer.json()["usage"]["completion_tokens"] == 4, answer.text
        assert refused.status_code == 400 and "1000" in refused.text
        serve.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(serve.wait, 30) == 0
    finally:
        serve.kill()
        serve.wait()
