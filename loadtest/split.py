"""Prefill and decode apart: against vLLM split the same way, and against one worker of role `both`.

    scripts/peers .peers     # installs vLLM's CPU build and nixl, once
    python -m loadtest.split --peers .peers [--parts vllm,bursts]

vllm: a closed loop on Baton's ring, and on two `vllm serve` with NixlConnector on CPU buffers behind a plain
proxy (`loadtest.proxy`). Each prefill computes on the first half of the cores, each decode on the second;
router, HTTP servers, proxy and this program have all of them.

bursts: streams run on and on while bursts of long prompts come, on the ring and on one worker of role `both`
with the same cores in total. What counts is how long the streams wait for their next token; what the bursts
wait for their first is told as well.

The systems of a part serve at the same time and are asked in turns (`loadtest.turns`).
"""

from __future__ import annotations

import argparse
import json
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, fields
from functools import partial
from itertools import count
from pathlib import Path
from typing import TypeAlias

from rich.console import Console

from loadtest.bursts import Bursts, ask_bursts
from loadtest.conditions import conditions
from loadtest.engines import Engine, baton_both, baton_split, vllm_split
from loadtest.shapes import SHAPES, save_random
from loadtest.turns import Load, Round, ask_one, closed_loops, table, take_turns

VLLM, BURSTS = "vllm", "bursts"
RING = "Baton 1P1D"
AGAINST = {VLLM: "vLLM 1P1D", BURSTS: "Baton both"}
"""The system that the ring is compared with, by part."""
WARM_UP = Bursts(settle=0.5, count=1, every=6.0, prompts=1)

Engines: TypeAlias = Mapping[str, Engine]


def against_vllm(engines: Engines, model: Path, chosen: argparse.Namespace) -> Iterator[Round]:
    load = Load(chosen.input_len, chosen.output_len, chosen.concurrency, chosen.requests)
    return closed_loops(engines, model, load, chosen.repeats, count(1))


def under_bursts(engines: Engines, model: Path, chosen: argparse.Namespace) -> Iterator[Round]:
    load = Bursts(**{field.name: getattr(chosen, field.name) for field in fields(Bursts)})
    seeds = count(1)
    seed = next(seeds)
    for engine in engines.values():
        ask_one(engine, partial(ask_bursts, model, WARM_UP), seed)
    return take_turns(str(load), engines, partial(ask_bursts, model, load), chosen.repeats, seeds)


MEASURE: Mapping[str, Callable[[Engines, Path, argparse.Namespace], Iterator[Round]]] = {
    VLLM: against_vllm,
    BURSTS: under_bursts,
}


def run(part: str, tmp: Path, model: Path, chosen: argparse.Namespace, console: Console) -> list[Round]:
    """Start both systems, measure, and show the table. Every round is printed as it ends."""
    with ExitStack() as stack:
        engines = {RING: stack.enter_context(baton_split(tmp / "ring", model))}
        if part == VLLM:
            engines[AGAINST[part]] = stack.enter_context(
                vllm_split(tmp, model, chosen.peers, apart=chosen.apart)
            )
        else:
            engines[AGAINST[part]] = stack.enter_context(baton_both(tmp / "both", model, chosen.both))
        rounds = []
        for one in MEASURE[part](engines, model, chosen):
            rounds.append(one)
            console.print(json.dumps({"part": part, **asdict(one)}), soft_wrap=True)
    console.print(table(f"{chosen.model}, bfloat16", rounds, RING, AGAINST[part]))
    return rounds


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options; a wrong one ends the program with a line about it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--peers", type=Path, default=Path(".peers"), help="what scripts/peers installed")
    parser.add_argument("--parts", default=",".join(AGAINST), help="some of " + ", ".join(AGAINST))
    parser.add_argument("--model", default="llama-125m", choices=sorted(SHAPES))
    parser.add_argument("--directory", type=Path, help="where models are kept; default: a temporary one")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write conditions and every round's figures")
    loop = parser.add_argument_group(VLLM)
    loop.add_argument("--input-len", type=int, default=512)
    loop.add_argument("--output-len", type=int, default=64)
    loop.add_argument("--concurrency", type=int, default=8)
    loop.add_argument("--requests", type=int, default=32, help="of a round")
    loop.add_argument(
        "--vllm-as-it-pins", dest="apart", action="store_false", help="both of vLLM's on the core it chooses"
    )
    bursts = parser.add_argument_group(BURSTS)
    bursts.add_argument(
        "--both", type=shlex.split, default=[], help="more options of the worker of role both"
    )
    for field in fields(Bursts):
        kind = type(field.default)
        bursts.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    chosen = parser.parse_args(arguments)
    chosen.parts = chosen.parts.split(",")
    for part in chosen.parts:
        if part not in AGAINST:
            parser.error(f"--parts: there is no {part!r}; allowed: {', '.join(AGAINST)}")
    for name, value in vars(chosen).items():
        if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
            parser.error(f"--{name.replace('_', '-')}: must be above 0, not {value:g}")
    if VLLM in chosen.parts and not (chosen.peers / "bin" / "vllm").is_file():
        parser.error(f"--peers: there is no vLLM in {chosen.peers}; scripts/peers installs it")
    return chosen


def main() -> None:
    chosen = parse()
    console = Console(width=140)
    told = conditions("loadtest.split", chosen.peers if VLLM in chosen.parts else None)
    for line in told:
        console.print(line, soft_wrap=True)
    done: dict[str, list[Round]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        tmp = Path(scratch)
        model = save_random((chosen.directory or tmp) / chosen.model, SHAPES[chosen.model])
        for part in chosen.parts:
            done[part] = run(part, tmp / part, model, chosen, console)
    if chosen.json is not None:
        parts = {part: [asdict(one) for one in rounds] for part, rounds in done.items()}
        chosen.json.write_text(json.dumps({"conditions": told, **parts}, indent=2))


if __name__ == "__main__":
    main()
