"""The time that a handoff adds to a prompt's first token: a ring against one worker, on the same cores.

    python -m loadtest.handoff [--connector tcp,ucx,ucx-tcp,nixl,gloo] [--tokens 500,2000,8000] [--repeats 5]

A ring (one prefill and one decode worker) and a worker of role ``both`` serve the same random model of 126
million parameters in float32. Prompts without cached tokens go to the one and the other in turns, each alone.
The prefill worker and the ``both`` worker have the same cores; decode, the routers and this program have the
others. Ratios are of medians within one run.

The second table shows the time between prefill's last chunk and decode's first step, by stage. It is read
from the workers' own logs of each handoff (``--log-level debug``), whose clocks are one on one host.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from baton.models.config import ModelConfig
from baton.models.decoder import Decoder
from baton.models.quantization.plain import PLAIN
from baton.parallel.collectives import Parallel
from loadtest import cores
from tests.support.clients import RingClient
from tests.support.ring import Ring, running_ring
from tests.support.tiny_models import save_shape

VOCAB = 4096
BLOCK_SIZE = 16
LLAMA: Mapping[str, object] = {
    "vocab_size": VOCAB,
    "hidden_size": 768,
    "intermediate_size": 2560,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 16384,
}
"""A Llama whose KV takes 32 KiB a token in float32."""
MODEL = "llama"
NEW_TOKENS = 3
CONNECTORS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "tcp": ("tcp", {}),
    "ucx": ("ucx", {}),
    "ucx-tcp": ("ucx", {"UCX_TLS": "tcp"}),
    "nixl": ("nixl", {}),
    "gloo": ("gloo", {}),
}
"""The workers' ``--connector`` and their environment, by the name used here."""


@dataclass(frozen=True)
class Sample:
    """A prompt at the client: the moment it was sent, in seconds of this host's monotonic clock, and the
    times from there to its first tokens."""

    sent: float
    first: float
    second: float
    third: float


@dataclass(frozen=True)
class Account:
    """The moments of a handoff's stages, as the two workers log them."""

    prefill: Mapping[str, float]
    decode: Mapping[str, float]
    client: Sample


STEPS: Mapping[str, Callable[[Account], float]] = {
    "last chunk computed to last send posted": lambda a: a.prefill["posted"] - a.prefill["computed"],
    "to the last send over": lambda a: a.prefill["sent"] - a.prefill["posted"],
    "to SendComplete said": lambda a: a.prefill["complete"] - a.prefill["sent"],
    "to SendComplete heard": lambda a: a.decode["complete"] - a.prefill["complete"],
    "to committed": lambda a: a.decode["committed"] - a.decode["complete"],
    "to decode's first step": lambda a: a.decode["started"] - a.decode["committed"],
    "= last chunk computed to decode's first step": lambda a: a.decode["started"] - a.prefill["computed"],
}
AROUND: Mapping[str, Callable[[Account], float]] = {
    "client sends to prefill asks for room": lambda a: a.prefill["asked"] - a.client.sent,
    "prefill asks to room is promised": lambda a: a.prefill["credited"] - a.prefill["asked"],
    "last chunk computed to first token at the client": lambda a: (
        a.client.sent + a.client.first - a.prefill["computed"]
    ),
    "decode's first step to second token at the client": lambda a: (
        a.client.sent + a.client.second - a.decode["started"]
    ),
}


def num_parameters(path: Path) -> int:
    config = ModelConfig.from_dir(path)
    with torch.device("meta"):
        model = Decoder(config, torch.float32, Parallel.alone(config), PLAIN)
    return sum(parameter.numel() for parameter in model.parameters())


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the processes started within."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def rings(tmp: Path, model: Path, connector: str, threads: int, longest: int) -> Iterator[tuple[Ring, Ring]]:
    """Start 1P1D over ``connector``, and one worker of role ``both``, with the cores shared out."""
    all_cores = cores.available()
    computing, others = all_cores[:threads], all_cores[threads:]
    if not others:
        raise SystemExit(f"--threads: {threads} leaves none of the {len(all_cores)} cores to decode")
    flag, variables = CONNECTORS[connector]
    # The pools hold little more than one prompt: each prompt takes the memory of the one before, so that no
    # memory is new to the system.
    num_blocks = longest // BLOCK_SIZE + 64
    sizes = ("--block-size", str(BLOCK_SIZE), "--num-blocks", str(num_blocks), "--threads", str(threads))
    options = ("--load-format", "dummy", "--connector", flag, "--log-level", "debug", *sizes)
    with (
        environment(variables),
        running_ring(tmp / "split", model=str(model), options=options) as split,
        running_ring(tmp / "one", model=str(model), prefill=0, decode=0, both=1, options=options) as one,
    ):
        for service in (*split.of_role("decode"), split.router, one.router):
            cores.pin(service.process.pid, others)
        for service in (*split.of_role("prefill"), *one.of_role("both")):
            cores.pin(service.process.pid, computing)
        yield split, one


async def ask(client: RingClient, rng: random.Random, tokens: int) -> Sample:
    prompt = [rng.randrange(2, VOCAB) for _ in range(tokens)]
    sent = time.monotonic()
    answer = await client.stream(prompt, max_tokens=NEW_TOKENS, temperature=0)
    first, second, third = answer.arrivals
    return Sample(sent, first, second, third)


async def in_turns(
    split: Ring, one: Ring, tokens: int, repeats: int, rng: random.Random
) -> tuple[list[Sample], list[Sample]]:
    """Return the samples of the ring and of the one worker."""
    samples: tuple[list[Sample], list[Sample]] = ([], [])
    async with RingClient(split.url, MODEL) as to_split, RingClient(one.url, MODEL) as to_one:
        turns = [(to_split, samples[0]), (to_one, samples[1])]
        for client, _ in turns:  # links and memory are new to the first prompts
            await ask(client, rng, tokens)
        for number in range(repeats):
            for client, taken in turns if number % 2 else reversed(turns):
                taken.append(await ask(client, rng, tokens))
    return samples


def accounts(split: Ring, samples: Sequence[Sample]) -> list[Account]:
    """Return the last handoffs, which are those of ``samples``."""
    (prefill,), (decode,) = split.of_role("prefill"), split.of_role("decode")
    sides = zip(prefill.handoffs(), decode.handoffs(), strict=True)
    return [Account(p, d, s) for (p, d), s in zip(list(sides)[-len(samples) :], samples, strict=True)]


@dataclass(frozen=True)
class Result:
    """The result of one connector with prompts of one length."""

    connector: str
    tokens: int
    ring: list[Account]
    one_worker: list[Sample]

    def medians(self, of: Callable[[Sample], float]) -> tuple[float, float]:
        """Return the medians of the ring and of the one worker."""
        through = statistics.median(of(account.client) for account in self.ring)
        return through, statistics.median(map(of, self.one_worker))

    def row(self) -> list[str]:
        ttft, alone = self.medians(lambda s: s.first)
        second, second_alone = self.medians(lambda s: s.second - s.first)
        times = [f"{ttft:.3f} s", f"{alone:.3f} s", f"{ttft / alone:.3f}"]
        gaps = [f"{gap * 1e3:.1f} ms" for gap in (second, second_alone)]
        return [self.connector, str(self.tokens), *times, *gaps]


def measure(tmp: Path, model: Path, connector: str, tokens: int, repeats: int, threads: int) -> Result:
    place = tmp / f"{connector}-{tokens}"
    with rings(place, model, connector, threads, tokens) as (split, one):
        ring, local = asyncio.run(in_turns(split, one, tokens, repeats, random.Random(tokens)))
        return Result(connector, tokens, accounts(split, ring), local)


def show(results: Sequence[Result], title: str) -> None:
    totals = Table("connector", "prompt", "TTFT, ring", "one worker", "ratio", title=title)
    totals.add_column("2nd token after, ring")
    totals.add_column("one worker")
    for result in results:
        totals.add_row(*result.row())
    steps = Table("milliseconds, medians", *(f"{r.connector} {r.tokens}" for r in results))
    for name, of in {**STEPS, **AROUND}.items():
        cells = [f"{statistics.median(map(of, result.ring)) * 1e3:.1f}" for result in results]
        steps.add_row(name, *cells, end_section=name.startswith("="))
    Console().print(totals, steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--connector", default=",".join(CONNECTORS), help="some of " + ", ".join(CONNECTORS))
    parser.add_argument("--tokens", default="2000", help="lengths of the prompts, with commas between them")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="cores of prefill, and of the one worker")
    parser.add_argument("--json", type=Path, help="a file for every sample")
    parser.add_argument("--layers", type=int, default=LLAMA["num_hidden_layers"], help="of the random model")
    args = parser.parse_args()
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as tmp:
        model = save_shape(Path(tmp) / MODEL, **{**LLAMA, "num_hidden_layers": args.layers})
        title = f"{num_parameters(model) / 1e6:.0f} M parameters, {args.threads} core(s) to prefill"
        for connector, tokens in product(args.connector.split(","), map(int, args.tokens.split(","))):
            results.append(measure(Path(tmp), model, connector, tokens, args.repeats, args.threads))
            print(*results[-1].row(), sep="  ", flush=True)
    show(results, f"{title}, medians of {args.repeats}")
    if args.json:
        args.json.write_text(json.dumps([asdict(result) for result in results], indent=2))


if __name__ == "__main__":
    main()
