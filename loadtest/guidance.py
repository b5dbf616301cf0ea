"""The cost of guidance for each token: one engine, with and without it, in turns.

    python -m loadtest.guidance --model demo --batch 1,16 --tokens 64 --rounds 5

Steps of guided and free sequences are timed in one process, a round of each after the other, and the medians
of all rounds are printed. On a CPU the time is the engine's CPU time, with one thread, so that other programs
count little. Then the cost of a mask itself is measured, for a made-up vocabulary of a large model's size.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from array import array

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from baton import hub
from baton.core.sampling_params import ResolvedSampling
from baton.core.structured_output import StructuredOutput, choice_text
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.runner import ModelRunner
from baton.engine.sampling.guidance import Guide, GuidedRow, masks_of
from baton.engine.sequence import Sequence
from baton.grammar.compiler import GrammarCompiler
from baton.grammar.table import TokenTable

ENDLESS = {
    "regex": StructuredOutput("regex", r"([a-z]{1,12}[ ,.]){5000}"),
    "JSON schema": StructuredOutput(
        "json_schema",
        json.dumps(
            {
                "type": "array",
                "minItems": 5000,
                "items": {
                    "type": "object",
                    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
                    "required": ["name", "age"],
                    "additionalProperties": False,
                },
            }
        ),
    ),
    "grammar": StructuredOutput(
        "grammar",
        'root ::= row+\nrow ::= field ("," field){3} "\\n"\nfield ::= [a-z]{1,9} | "\\"" [^"]{0,9} "\\""',
    ),
}
"""Structured outputs whose texts need not end within a measurement."""


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of guidance for each token.")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", default="1,16", help="sequences at once, several with commas")
    parser.add_argument("--tokens", type=int, default=64, help="steps in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vocabulary", type=int, default=131072, help="of the made-up tokenizer")
    args = parser.parse_args()
    torch.set_num_threads(1)
    path = hub.resolve_model(args.model)
    config = EngineConfig(model=path, device=args.device, dtype="auto" if args.device != "cpu" else "float32")
    engine = Engine.from_config(config)
    began = time.perf_counter()
    for output in ENDLESS.values():
        assert engine.grammars is not None
        engine.grammars.compile(output).result(60)
    first = (time.perf_counter() - began) * 1e3
    print(f"first grammars compiled after {first:.0f} ms, the process for trials included")
    for batch in map(int, args.batch.split(",")):
        measure(engine, batch, args.tokens, args.rounds)
    vocabulary(args.vocabulary, args.tokens, args.device)


def measure(engine: Engine, batch: int, tokens: int, rounds: int) -> None:
    """Print the median time of a step, free and guided, and the difference for each token."""
    forms: dict[str, StructuredOutput | None] = {"free": None, **ENDLESS}
    steps: dict[str, list[float]] = {name: [] for name in forms}
    masks: dict[str, list[float]] = {name: [] for name in forms}
    for number in range(-1, rounds):  # the first round is to warm up
        for name, output in forms.items():
            before = runner_of(engine).masks.stats
            seconds = round_of(engine, batch, tokens, output)
            after = runner_of(engine).masks.stats
            if number >= 0:
                steps[name].append(seconds / tokens * 1e3)
                masks[name].append((after.seconds - before.seconds) / (batch * tokens) * 1e6)
    free = statistics.median(steps["free"])
    print(f"batch {batch}: a free step takes {free:.3f} ms")
    for name in ENDLESS:
        step = statistics.median(steps[name])
        print(
            f"  {name:12} {step:8.3f} ms a step: {(step - free) / batch * 1e3:+8.1f} us a token, of which "
            f"{statistics.median(masks[name]):.1f} us for computing its mask"
        )


def runner_of(engine: Engine) -> ModelRunner:
    assert isinstance(engine.runner, ModelRunner)
    return engine.runner


def round_of(engine: Engine, batch: int, tokens: int, output: StructuredOutput | None) -> float:
    """Return the time of ``tokens`` decode steps of ``batch`` sequences, in seconds."""
    clock = time.thread_time if runner_of(engine).device.type == "cpu" else time.perf_counter
    params = ResolvedSampling(
        max_tokens=tokens + 2, ignore_eos=True, temperature=0.8, structured_output=output
    )
    for i in range(batch):
        engine.add(Sequence(f"{i}", 0, array("I", range(10 + i, 30 + i)), params))
    while any(seq.num_uncomputed != 1 for seq in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    began = clock()
    for _ in range(tokens):
        engine.step()
    seconds = clock() - began
    while engine.has_work:
        engine.step()
    return seconds


def vocabulary(size: int, tokens: int, device: str) -> None:
    """Print the cost of masks with a vocabulary of ``size`` made-up words."""
    table = TokenTable(made_up_tokenizer(size), size, [0])
    began = time.perf_counter()
    table.build()
    print(
        f"vocabulary of {size}: building the token table takes {(time.perf_counter() - began) * 1e3:.0f} ms"
    )
    compiler = GrammarCompiler(lambda: table)
    choose = random.Random(0)
    for name, output in {**ENDLESS, "choice": StructuredOutput("choice", choice_text(["yes", "no"]))}.items():
        guide = Guide(
            compiler.compile(output).result(60), ResolvedSampling(max_tokens=tokens), frozenset({0})
        )
        output_ids: list[int] = []
        times = []
        for _ in range(tokens):
            began = time.perf_counter()
            words = guide.mask(output_ids)
            times.append((time.perf_counter() - began) * 1e6)
            allowed = torch.from_numpy(words)[:, None] >> torch.arange(32, dtype=torch.int32) & 1
            following = allowed.flatten().nonzero().flatten().tolist()
            following.remove(0) if 0 in following else None
            if not following:
                break
            output_ids.append(choose.choice(following))
        print(f"  {name:12} a mask takes {statistics.median(times):.1f} us, {max(times):.0f} us at most")
    guide = Guide(
        compiler.compile(ENDLESS["regex"]).result(60), ResolvedSampling(max_tokens=1), frozenset({0})
    )
    logits = torch.randn(16, size, device=device)
    masks = masks_of([GuidedRow(at, guide, []) for at in range(16)])
    times = []
    for _ in range(20):
        began = time.perf_counter()
        masks.apply(logits)
        if device != "cpu":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e6 / 16)
    print(f"  applying to logits on {device}, 16 rows at once: {statistics.median(times):.1f} us a row")
    compiler.close()


def made_up_tokenizer(size: int) -> str:
    """Return a ``tokenizer.json`` of every byte and of random words of up to 9 letters, some after a
    space."""
    choose = random.Random(0)
    words = dict.fromkeys(["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())])
    while len(words) < size:
        letters = "".join(choose.choices("etaoinshrdlcumwfgypbvk{}[]:,\"'0123456789", k=choose.randint(2, 9)))
        words[choose.choice(("", "Ġ")) + letters] = None
    backend = Backend(models.BPE({word: i for i, word in enumerate(words)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return backend.to_str()


if __name__ == "__main__":
    main()
