"""``baton bench`` with the demo model: through a ring, offline, and the rings that a sweep starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from baton import LLM
from baton.bench.config import LatencyConfig
from baton.bench.offline.latency import latency
from baton.bench.offline.throughput import throughput
from baton.bench.sweep.candidate import RingCandidate, RoleSplit
from baton.bench.workload.config import WorkloadConfig
from baton.cli import client
from baton.cli.bench_ring import LocalRings
from baton.process.options import StartError
from baton.worker.config import WorkerConfig
from tests.support.ring import Ring

pytestmark = pytest.mark.beside


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", dtype="float32", num_blocks=64)


def test_serve_measures_a_ring(demo_ring: Ring, tmp_path: Path) -> None:
    result = subprocess.run(
        [
            *(sys.executable, "-m", "baton", "bench", "serve", "--url", demo_ring.url),
            *("--workload", "shared-prefix", "--prefix-len", "48", "--num-prefixes", "1"),
            *("--num-prompts", "8", "--input-len", "16", "--output-len", "6", "--request-rate", "20"),
            *("--seed", "11", "--goodput", "ttft:60000 e2e:60000"),
            *("--json", str(tmp_path / "run.json"), "--plot", str(tmp_path / "run.svg")),
        ],
        capture_output=True,
        text=True,
        timeout=480,
    )
    assert result.returncode == 0, result.stderr
    assert "8 of 8 requests answered" in result.stdout
    assert "8 requests to demo" in result.stdout
    assert (tmp_path / "run.svg").stat().st_size > 1000
    document = json.loads((tmp_path / "run.json").read_text())
    figures = document["figures"]
    assert document["request"]["prompts"] == "ids"
    assert (figures["completed"], figures["prompt_tokens"], figures["output_tokens"]) == (8, 8 * 64, 8 * 6)
    assert figures["goodput"]["attainment"] == 1
    assert figures["cached_tokens"] > 0  # the prefix, from the second or third request on
    assert figures["tokens_per_chunk_known"]
    for record in document["requests"]:
        assert sum(arrival["tokens"] for arrival in record["arrivals"]) == 6
        assert 0 < record["arrivals"][0]["at"] <= record["arrivals"][-1]["at"] <= record["ended"]
    demo_ring.wait_idle()


def test_latency_of_a_batch(llm: LLM) -> None:
    result = latency(llm, LatencyConfig(batch_size=2, input_len=8, output_len=4, warmups=1, repeats=3))
    assert len(result.repeats) == 3
    assert result.whole.median > 0
    assert result.per_token.median == pytest.approx(result.whole.median / 4)


def test_throughput_of_a_workload(llm: LLM) -> None:
    load = WorkloadConfig(num_prompts=6, input_len=8, output_len=4, range_ratio=0.5)
    result = throughput(llm, load, progress=False)
    assert result.requests == 6
    assert 6 * 4 <= result.prompt_tokens <= 6 * 12
    assert 6 * 2 <= result.output_tokens <= 6 * 6
    assert result.output_tokens_per_s == pytest.approx(result.output_tokens / result.duration)


@pytest.mark.deep
async def test_a_sweeps_ring_starts_and_leaves_nothing() -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    rings = LocalRings(WorkerConfig(role="both", dtype="float32", num_blocks=64), ["cpu"])
    async with rings.running(RingCandidate(RoleSplit(both=1), 1, 8, 64, 32)) as url:
        assert client.is_ready(url)
        ours = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
        readers = [child for child in ours if "baton.router.preparation.program" in child.cmdline()]
        assert len(ours) == 2 + len(readers), "a worker, a router, and what reads its bodies"
        assert readers
        [worker] = [child.cmdline() for child in ours if "--max-num-seqs" in child.cmdline()]
        assert worker[worker.index("--prefill-chunk") + 1] == "32"
    assert not [child for child in ours if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.deep
async def test_a_ring_that_cannot_start_says_why() -> None:
    rings = LocalRings(WorkerConfig(role="both", model="/nowhere"), ["cpu"])
    with pytest.raises(StartError, match=r"did not start: .*/nowhere"):
        async with rings.running(RingCandidate(RoleSplit(both=1), 1, 8, 64, 32)):
            pass
