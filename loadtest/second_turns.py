"""TTFT of a chat's second turn against that of a cold prompt as long, by what the model's layers keep.

    python -m loadtest.second_turns [--models gemma3-270m,mla-0.3b,gdn-0.3b] [--repeats 7] [--at-most 0.25]

A chat is a prompt of 1,500 tokens and an answer of 64; its second turn is both and 200 tokens more. A cold
prompt has as many tokens, which nobody sent before. Windows are Gemma 3's, latents DeepSeek-V2's, and states
those of Qwen3-Next's delta nets; weights are random (``loadtest.shapes``).

One worker of role ``both`` has all cores. In the ring, prefill and decode have one half each and every prompt
is handed on. Both are up at the same time and are asked in turns, chat and cold prompt first by turns; ratios
are medians of the rounds' ratios. Exit status 1: a ratio is above ``--at-most``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from baton.models.config import ModelConfig
from loadtest.conditions import conditions
from loadtest.engines import Engine, baton_both, baton_split
from loadtest.shapes import NUM_BYTES, SHAPES, save_random
from tests.support.clients import RingClient

KEEPS: Mapping[str, str] = {"gemma3-270m": "window", "mla-0.3b": "latent", "gdn-0.3b": "state"}
PROMPT, ANSWER, MORE = 1500, 64, 200
NEW_TOKENS = 2
"""The answer whose first token is waited for."""
WORKER, RING = "one worker", "ring"


@dataclass(frozen=True)
class Round:
    """The TTFT of a second turn and of a cold prompt, in seconds, and the second turn's cached tokens."""

    model: str
    system: str
    second: float
    cold: float
    cached: int

    @property
    def ratio(self) -> float:
        return self.second / self.cold


class Prompts:
    """Random tokens of a vocabulary, without the special ones and those that end an answer."""

    def __init__(self, model: Path, seed: int) -> None:
        self._most = ModelConfig.from_dir(model).vocab_size
        self._random = random.Random(seed)

    def draw(self, length: int) -> list[int]:
        return [self._random.randrange(NUM_BYTES, self._most) for _ in range(length)]


async def second_turn(client: RingClient, prompts: Prompts) -> tuple[float, int]:
    """Return the TTFT of a chat's second turn, and its cached tokens. Raises RuntimeError if the cache has
    none of them."""
    prompt = prompts.draw(PROMPT)
    first = await client.stream(prompt, max_tokens=ANSWER, temperature=0)
    told = [*prompt, *first.token_ids, *prompts.draw(MORE)]
    second = await client.stream(told, max_tokens=NEW_TOKENS, temperature=0)
    if not second.cached_tokens:
        raise RuntimeError("a second turn found nothing in the prefix cache")
    return second.arrivals[0], second.cached_tokens


async def cold_prompt(client: RingClient, prompts: Prompts) -> float:
    """Return the TTFT of a prompt that nobody sent before. Raises RuntimeError if tokens of it were
    cached."""
    found = await client.stream(prompts.draw(PROMPT + ANSWER + MORE), max_tokens=NEW_TOKENS, temperature=0)
    if found.cached_tokens:
        raise RuntimeError(f"{found.cached_tokens} tokens of a cold prompt were in the prefix cache")
    return found.arrivals[0]


async def ask(name: str, system: str, client: RingClient, prompts: Prompts, cold_first: bool) -> Round:
    if cold_first:
        cold = await cold_prompt(client, prompts)
        second, cached = await second_turn(client, prompts)
    else:
        second, cached = await second_turn(client, prompts)
        cold = await cold_prompt(client, prompts)
    return Round(name, system, second, cold, cached)


@contextmanager
def systems(tmp: Path, model: Path) -> Iterator[Mapping[str, Engine]]:
    """Start one worker and a ring of the model."""
    with baton_both(tmp / "both", model) as worker, baton_split(tmp / "ring", model, "always") as ring:
        yield {WORKER: worker, RING: ring}


async def measure(
    name: str, model: Path, engines: Mapping[str, Engine], repeats: int, seed: int
) -> list[Round]:
    """Return the rounds of a model, after one of each system that does not count."""
    prompts, found = Prompts(model, seed), []
    for number in range(-1, repeats):
        for system in sorted(engines, reverse=number % 2 == 1):
            async with RingClient(engines[system].url, model.name) as client:
                one = await ask(name, system, client, prompts, cold_first=number % 4 >= 2)
            if number >= 0:
                found.append(one)
    return found


def table(rounds: Sequence[Round], at_most: float) -> Table:
    shown = Table(title="TTFT of a second turn", title_justify="left")
    for column in ("model", "keeps", "system", "second turn, ms", "cold, ms", "ratio", "at most"):
        shown.add_column(column, justify="right")
    for column in ("ratios of the rounds", "cached tokens"):
        shown.add_column(column, justify="right")
    for (name, system), own in by_case(rounds).items():
        ratios = sorted(one.ratio for one in own)
        shown.add_row(
            name,
            KEEPS.get(name, ""),
            system,
            f"{statistics.median(one.second for one in own) * 1e3:.0f}",
            f"{statistics.median(one.cold for one in own) * 1e3:.0f}",
            f"{statistics.median(ratios):.3f}",
            f"{at_most:g}",
            f"{ratios[0]:.2f} to {ratios[-1]:.2f}",
            str(min(one.cached for one in own)),
        )
    return shown


def by_case(rounds: Sequence[Round]) -> dict[tuple[str, str], list[Round]]:
    """Return the rounds by model and system."""
    found: dict[tuple[str, str], list[Round]] = {}
    for one in rounds:
        found.setdefault((one.model, one.system), []).append(one)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", default=",".join(KEEPS), help="some of loadtest.shapes")
    parser.add_argument("--directory", type=Path, help="where models are kept; default: a temporary one")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-most", type=float, default=0.25)
    parser.add_argument("--json", type=Path, help="write every round's figures")
    chosen = parser.parse_args()
    console = Console(width=140)
    for line in conditions("loadtest.second_turns"):
        console.print(line, soft_wrap=True)
    rounds: list[Round] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in chosen.models.split(","):
            model = save_random((chosen.directory or Path(scratch)) / name, SHAPES[name])
            with systems(Path(scratch) / f"of-{name}", model) as engines:
                rounds += asyncio.run(measure(name, model, engines, chosen.repeats, chosen.seed))
    console.print(table(rounds, chosen.at_most))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps([asdict(one) for one in rounds], indent=2))
    worst = max(statistics.median(one.ratio for one in own) for own in by_case(rounds).values())
    sys.exit(worst > chosen.at_most)


if __name__ == "__main__":
    main()
