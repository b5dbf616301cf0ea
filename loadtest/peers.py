"""Baton against vLLM's CPU build: the same model, the same load, on the same cores, in turns.

    scripts/peers .peers     # installs the peer, once
    python -m loadtest.peers --peers .peers [--models llama-125m,qwen-0.5b] [--concurrency 1,8,32]

Both are up at the same time and asked in turns, so each stands still while the other works; each round
asks with prompts of its own, the same for both. The figures are medians over the rounds, and the ratios are
the medians of each round's ratio. Both may use all cores. A step of Baton's takes 1,536 tokens unless
``--baton`` says otherwise; vLLM's takes 2,048, its default. (Baton's own default, 512, is for short gaps.)
"""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import ExitStack
from itertools import count
from pathlib import Path

from rich.console import Console

from loadtest.conditions import conditions
from loadtest.engines import baton_both, vllm
from loadtest.shapes import SHAPES, save_random
from loadtest.turns import Load, closed_loops, table


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
    parser.add_argument("--baton", default="--max-num-batched-tokens 1536", help="options of Baton's worker")
    parser.add_argument("--json", type=Path, help="write every round's figures")
    chosen = parser.parse_args()
    if not (chosen.peers / "bin" / "vllm").is_file():
        parser.error(f"--peers: there is no vLLM in {chosen.peers}; scripts/peers installs it")
    extra = chosen.baton.split()
    console = Console(width=140)
    for line in conditions("loadtest.peers", chosen.peers):
        console.print(line, soft_wrap=True)
    written = []
    with tempfile.TemporaryDirectory() as scratch:
        tmp = Path(scratch)
        for name in chosen.models.split(","):
            model = save_random((chosen.directory or tmp) / name, SHAPES[name])
            with ExitStack() as stack:
                engines = {
                    "Baton": stack.enter_context(baton_both(tmp / f"baton-{name}", model, extra)),
                    "vLLM": stack.enter_context(vllm(tmp, model, chosen.peers)),
                }
                done = []
                seeds = count(1)
                for many in map(int, chosen.concurrency.split(",")):
                    load = Load(chosen.input_len, chosen.output_len, many, chosen.requests or 2 * many)
                    for one in closed_loops(engines, model, load, chosen.repeats, seeds):
                        done.append(one)
                        written.append({"model": name, "concurrency": many, **one.figures})
                        console.print(json.dumps(written[-1]), soft_wrap=True)
            console.print(table(f"{name}, bfloat16", done, "Baton", "vLLM"))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(written, indent=2))


if __name__ == "__main__":
    main()
