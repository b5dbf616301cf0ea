"""An address where a worker of another model is: the router has nothing to do with it, and says so."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import httpx
import pytest

from baton import hub
from baton.process import ready
from tests.support.ring import Ring, Service, running, scrape, simulated

pytestmark = [pytest.mark.beside, pytest.mark.deep]


def another_tokenizer(tmp: Path) -> Path:
    """The demo model's files under its name, with two token ids that have changed their meanings."""
    path = tmp / "demo"
    shutil.copytree(hub.resolve_model("demo"), path)
    content = json.loads((path / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    one, other = list(vocab)[-2:]
    vocab[one], vocab[other] = vocab[other], vocab[one]
    (path / "tokenizer.json").write_text(json.dumps(content))
    return path


def refused(ring: Ring) -> dict[str, float]:
    """By address."""
    found = scrape(f"{ring.url}/metrics").items()
    return {
        key.partition('worker="')[2].partition('"')[0]: value
        for key, value in found
        if key.startswith("baton_worker_refused{")
    }


def test_workers_of_another_model_get_no_request(tmp_path: Path) -> None:
    named = simulated(tmp_path, "named", "both", "--served-model-name", "llama-70b")
    other = simulated(tmp_path, "other", "both", model=str(another_tokenizer(tmp_path)))
    ours = simulated(tmp_path, "ours", "both")
    with running([named, other, ours]):
        at = [w.ready.address for w in (named, other, ours) if isinstance(w.ready, ready.WorkerReady)]
        flags = [flag for address in at for flag in ("--worker", address)]
        router = Service("router", ("router", "--port", "0", *flags), tmp_path / "router.log")
        router.start()
        router.wait_ready()
        ring = Ring(router, [named, other, ours])
        try:
            deadline = time.monotonic() + 120
            while refused(ring) != dict(zip(at, (1, 1, 0), strict=True)):
                assert time.monotonic() < deadline, (refused(ring), router.log.read_text())
                time.sleep(0.1)
            for number in range(6):
                body = {"model": "demo", "prompt": [number, 1, 2], "max_tokens": 2}
                assert httpx.post(f"{ring.url}/v1/completions", json=body, timeout=30).is_success
            name = 'baton_engine_generated_tokens_total{role="both"}'
            given = [worker.metrics()[name] for worker in ring.workers]
            assert given[:2] == [0, 0] and given[2] > 0
            log = router.log.read_text()
            assert log.count("is refused") == 2
            assert f"worker {at[0]} is refused: model: it serves 'llama-70b', and not demo" in log
            assert f"worker {at[1]} is refused: tokenizer: its token ids have other meanings" in log
        finally:
            router.stop()
