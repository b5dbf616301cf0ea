"""Baton against vLLM's CPU build: the same model, the same load, on the same cores, in turns.

    scripts/peers .peers     # installs the peer, once
    python -m loadtest.peers --peers .peers [--models llama-125m,qwen-0.5b] [--concurrency 1,8,32]

Both serve at the same time and are asked in turns, so each stands still while the other works; each round
asks with prompts of its own, the same for both. The figures are medians over the rounds, and the ratios are
the medians of each round's ratio. Both may use all cores.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from rich.console import Console
from rich.table import Table

from baton.bench.config import ServeConfig, WorkloadConfig
from baton.bench.serve import serve
from baton.bench.spread import Spread
from baton.bench.summary import Summary
from loadtest.shapes import SHAPES, save_random
from tests.support.ring import running_ring

START_S = 600.0
KV_GIB = "2"


@dataclass(frozen=True)
class Load:
    """What is asked for, and how many at once."""

    input_len: int
    output_len: int
    concurrency: int
    requests: int


@dataclass(frozen=True)
class Round:
    """The same load on one engine after the other: engine → its figures."""

    load: Load
    figures: Mapping[str, Summary]


def of(spread: Spread | None) -> Spread:
    """What a round in which every request was answered has."""
    assert spread is not None
    return spread


FIGURES: Mapping[str, Callable[[Summary], float]] = {
    "output tokens/s": lambda s: s.output_tokens_per_s,
    "TTFT median, ms": lambda s: of(s.ttft).median * 1e3,
    "TPOT median, ms": lambda s: of(s.tpot).median * 1e3,
    "ITL p99, ms": lambda s: of(s.itl).p99 * 1e3,
}


@contextmanager
def baton_both(tmp: Path, model: Path) -> Iterator[str]:
    """One worker that does both, with every core. Yields its router's address."""
    cores = str(len(os.sched_getaffinity(0)))
    options = ("--threads", cores, "--kv-cache-memory", f"{KV_GIB}GiB")
    with running_ring(
        tmp, model=str(model), prefill=0, decode=0, both=1, dtype="bfloat16", options=options
    ) as ring:
        yield ring.url


@contextmanager
def vllm(tmp: Path, model: Path, peers: Path) -> Iterator[str]:
    """``vllm serve`` with every core (its default leaves one to its HTTP server). Yields its address."""
    port = _free_port()
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    environment = {
        **os.environ,
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_CPU_KVCACHE_SPACE": KV_GIB,
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    options = ("--dtype", "bfloat16", "--max-model-len", "8192", "--port", str(port), "--host", "127.0.0.1")
    command = [str(peers / "bin" / "vllm"), "serve", str(model), *options]
    with (tmp / "vllm.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_healthy(url, process, tmp / "vllm.log")
            yield url
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if process.poll() is not None:
            raise RuntimeError(f"ended with {process.returncode}:\n{log.read_text()[-4000:]}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise RuntimeError(f"not ready within {START_S:.0f} s:\n{log.read_text()[-4000:]}")


def ask(url: str, model: Path, load: Load, seed: int) -> Summary:
    """One closed loop. RuntimeError if a request fails: figures of a part would be no comparison."""
    config = ServeConfig(
        workload=WorkloadConfig(
            num_prompts=load.requests, input_len=load.input_len, output_len=load.output_len, seed=seed
        ),
        url=url,
        tokenizer=str(model),
        max_concurrency=load.concurrency,
    )
    summary = serve(config, lambda line: None).summary
    if summary.errors or summary.output_tokens != load.requests * load.output_len:
        raise RuntimeError(f"{url}: {summary}")
    return summary


def rounds(urls: Mapping[str, str], model: Path, loads: Sequence[Load], repeats: int) -> Iterator[Round]:
    """Each load ``repeats`` times, the engines in turns, and the first of them another each time."""
    names = list(urls)
    seeds = count(1)  # one for each round: what a prefix cache knows is of no use to the next
    for load in loads:
        warm_up = Load(load.input_len, 4, load.concurrency, load.concurrency)
        seed = next(seeds)
        for url in urls.values():
            ask(url, model, warm_up, seed)
        for repeat in range(repeats):
            order = names[repeat % len(names) :] + names[: repeat % len(names)]
            seed = next(seeds)
            yield Round(load, {name: ask(urls[name], model, load, seed) for name in order})


def table(title: str, rounds: Sequence[Round], engines: Sequence[str]) -> Table:
    """A row for each load and figure; the ratio is the first engine's to the second's."""
    shown = Table(title=title, title_justify="left")
    for column in ("in/out", "concurrency", "figure", *engines, "ratio", "ratios of the rounds"):
        shown.add_column(column, justify="right")
    for load in dict.fromkeys(one.load for one in rounds):
        of_load = [one for one in rounds if one.load == load]
        for name, figure in FIGURES.items():
            values = {engine: [figure(one.figures[engine]) for one in of_load] for engine in engines}
            ratios = [ours / theirs for ours, theirs in zip(*values.values(), strict=True)]
            shown.add_row(
                f"{load.input_len}/{load.output_len}",
                str(load.concurrency),
                name,
                *(f"{statistics.median(those):.1f}" for those in values.values()),
                f"{statistics.median(ratios):.2f}",
                " ".join(f"{ratio:.2f}" for ratio in sorted(ratios)),
            )
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--peers", type=Path, default=Path(".peers"), help="what scripts/peers installed")
    parser.add_argument("--models", default="llama-125m,qwen-0.5b")
    parser.add_argument("--directory", type=Path, help="where models are kept; default: a temporary one")
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--requests", type=int, default=0, help="of a round; default: twice the concurrency")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write every round's figures")
    chosen = parser.parse_args()
    console = Console(width=140)
    written = []
    with tempfile.TemporaryDirectory() as scratch:
        tmp = Path(scratch)
        for name in chosen.models.split(","):
            model = save_random((chosen.directory or tmp) / name, SHAPES[name])
            loads = [
                Load(chosen.input_len, chosen.output_len, many, chosen.requests or 2 * many)
                for many in map(int, chosen.concurrency.split(","))
            ]
            with ExitStack() as stack:
                urls = {
                    "vLLM": stack.enter_context(vllm(tmp, model, chosen.peers)),
                    "Baton": stack.enter_context(baton_both(tmp / f"baton-{name}", model)),
                }
                done = []
                for one in rounds(urls, model, loads, chosen.repeats):
                    done.append(one)
                    figures = {n: {k: f(s) for k, f in FIGURES.items()} for n, s in one.figures.items()}
                    written.append({"model": name, "concurrency": one.load.concurrency, **figures})
                    console.print(json.dumps(written[-1]), soft_wrap=True)
            console.print(table(f"{name}, bfloat16", done, ("Baton", "vLLM")))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(written, indent=2))


if __name__ == "__main__":
    main()
