"""The gain of drafts: tokens per second without and with each method, in turns, in one process.

    python -m loadtest.speculation [--model demo] [--methods ngram,draft=PATH] [--batch 1,8]
                                   [--num-speculative-tokens 4] [--max-tokens 96] [--repeats 5]

Two workloads, greedy: *copy* asks in a second turn for the answer of the first, so that the answer is in the
prompt; *new* asks for the first time. Each method runs next to an engine without drafts, in turns, and the
ratio is that of the medians. On a CPU, seconds are those of the one thread that computes. Drafting per step
is wall time. Answers are compared token by token. With ``ngram``, one draft is timed by itself as well.
``draft=PATH`` names the small model, as do ``medusa=PATH`` and ``eagle=PATH``; without a path, the one in the
model's own directory is taken.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import get_args

from rich.console import Console
from rich.table import Table

from baton import LLM, SamplingParams
from baton.core.sampling_params import ResolvedSampling
from baton.engine.outputs import RequestOutput
from baton.engine.runner import ModelRunner
from baton.engine.sequence import Sequence
from baton.speculation.config import Method
from baton.speculation.ngram import NgramDrafter
from baton.speculation.stats import SpeculationStats

QUESTIONS = (
    "What is a KV cache?",
    "What is Baton?",
    "What is prefill?",
    "What is decode?",
    "What is paged attention?",
    "What is continuous batching?",
    "What is a prefix cache?",
    "What is speculative decoding?",
)
REPEATED = QUESTIONS[:2]
"""Questions that the demo model answers again word by word when it has answered them before."""
Chat = list[dict[str, str]]


@dataclass
class Samples:
    """An engine's runs of one workload."""

    rates: list[float] = field(default_factory=list)
    """Tokens per second."""
    answers: list[tuple[int, ...]] = field(default_factory=list)
    steps: int = 0
    spent: SpeculationStats = field(default_factory=SpeculationStats)


class Contender:
    """An engine under its name in the table."""

    def __init__(self, model: str, name: str, num_tokens: int) -> None:
        method, _, path = name.partition("=")
        methods: dict[str, Method] = {known: known for known in get_args(Method)}
        if method not in methods:
            raise SystemExit(f"--methods: {method!r} is none of {', '.join(methods)}")
        self.name = name
        self.llm = LLM(
            model,
            dtype="float32",
            num_threads=1,
            speculative_method=methods[method],
            speculative_model=path or None,
            num_speculative_tokens=num_tokens,
        )
        self._steps = 0
        run = self.llm.engine.runner.run

        def counted(*args: object) -> object:
            self._steps += 1
            return run(*args)  # type: ignore[arg-type]

        self.llm.engine.runner.run = counted  # type: ignore[method-assign, assignment]

    def answer(self, chats: Items[Chat], params: SamplingParams) -> list[RequestOutput]:
        return self.llm.chat(chats, params, progress=False)

    def run(self, chats: Items[Chat], params: SamplingParams, samples: Samples) -> None:
        before, steps = self.llm.engine.stats().speculation, self._steps
        # On a CPU, the time of one thread does not count others that compete for the core.
        runner = self.llm.engine.runner
        assert isinstance(runner, ModelRunner)
        clock = time.thread_time if runner.device.type == "cpu" else time.perf_counter
        began = clock()
        answers = [output.outputs[0].token_ids for output in self.answer(chats, params)]
        seconds = clock() - began
        after = self.llm.engine.stats().speculation
        samples.answers = answers
        samples.rates.append(sum(map(len, answers)) / seconds)
        samples.steps += self._steps - steps
        samples.spent = samples.spent.plus(after.minus(before))


def chats_of(workload: str, contender: Contender, batch: int, params: SamplingParams) -> list[Chat]:
    asked = QUESTIONS if workload == "new" else REPEATED
    questions = [asked[i % len(asked)] for i in range(batch)]
    chats: list[Chat] = [[{"role": "user", "content": question}] for question in questions]
    if workload == "new":
        return chats
    answers = contender.answer(chats, params)
    return [
        [*chat, {"role": "assistant", "content": answer.outputs[0].text}, *chat]
        for chat, answer in zip(chats, answers, strict=True)
    ]


def compare(
    plain: Contender, drafting: Contender, chats: Items[Chat], params: SamplingParams, repeats: int
) -> tuple[Samples, Samples]:
    for contender in (plain, drafting):
        contender.run(chats, params, Samples())  # the first run's costs are not counted
    without, with_drafts = Samples(), Samples()
    for number in range(repeats):
        order = [(plain, without), (drafting, with_drafts)]
        for contender, samples in order if number % 2 else reversed(order):
            contender.run(chats, params, samples)
    return without, with_drafts


def row(title: Items[str], without: Samples, with_drafts: Samples) -> list[str]:
    plain, drafted = statistics.median(without.rates), statistics.median(with_drafts.rates)
    spent = with_drafts.spent
    length = spent.accepted_tokens / max(1, spent.verifications) + 1
    return [
        *title,
        f"{plain:.0f}",
        f"{drafted:.0f}",
        f"{drafted / plain:.2f}",
        f"{length:.2f}",
        f"{spent.accepted_tokens / max(1, spent.drafted_tokens):.0%}",
        f"{spent.drafting_seconds / max(1, with_drafts.steps) * 1e3:.2f} ms",
        "same" if without.answers == with_drafts.answers else "DIFFERENT",
    ]


def lookup_times() -> Table:
    """Return the time of one draft by n-gram, of tokens drawn from a vocabulary of 4,096."""
    table = Table("tokens of context", "one draft, us", title="n-gram lookup, median of 2,001")
    drafter, rng = NgramDrafter(2, 4), random.Random(0)
    for length in (1_000, 8_000, 32_768, 131_072):
        sequence = Sequence(
            "r", 0, [rng.randrange(4096) for _ in range(length)], ResolvedSampling(max_tokens=16)
        )
        times = []
        for _ in range(2001):
            began = time.perf_counter()
            drafter.draft([sequence], [4])
            times.append(time.perf_counter() - began)
        table.add_row(f"{length:,}", f"{statistics.median(times) * 1e6:.1f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--methods", default="ngram", help="with commas between them")
    parser.add_argument("--batch", default="1,8", help="requests at once, with commas between them")
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    table = Table(
        "method",
        "workload",
        "batch",
        "plain tokens/s",
        "drafted tokens/s",
        "ratio",
        "tokens per verification",
        "accepted",
        "drafting per step",
        "answers",
        title=f"{args.model}, {args.num_speculative_tokens} drafts, medians of {args.repeats}",
    )
    plain = Contender(args.model, "none", args.num_speculative_tokens)
    for name in args.methods.split(","):
        drafting = Contender(args.model, name, args.num_speculative_tokens)
        for workload in ("copy", "new"):
            for batch in map(int, args.batch.split(",")):
                chats = chats_of(workload, plain, batch, params)
                results = compare(plain, drafting, chats, params, args.repeats)
                table.add_row(*row([name.partition("=")[0], workload, str(batch)], *results))
    console = Console(width=150)
    console.print(table)
    if "ngram" in args.methods.split(","):
        console.print(lookup_times())


if __name__ == "__main__":
    main()
