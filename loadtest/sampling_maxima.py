"""What each sampling parameter at its maximum costs others' steps, with the most answers of one request.

    python -m loadtest.sampling_maxima [--case bad_words] [--tokens 100] [--rounds 3]

One engine on a CPU, the demo model: some honest requests of one answer each, and beside them one request of
``n`` answers (the greatest that is allowed), calm and with one parameter at its greatest documented value, in
turns. Every step from the request's arrival to its end counts: the honest requests have a token in each. A
line has the median over the rounds of the steps' median and 99th percentile, divided by those of the calm
request of the same round, and the time for which the worker's event loop takes the request in. Times are the
engine's CPU time, with one thread, so that other programs count little. Exit status 1: a 99th percentile is
above ``--at-most``.

Beam searches, whose widths are bounded, are compared with as many sampled answers. Stop strings and the texts
of bad words cost the router alone: ``loadtest.router_maxima``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from rich.console import Console
from rich.table import Table

from baton import hub
from baton.core.beam_search import BEAM_WIDTHS, BeamParams
from baton.core.sampling_params import ResolvedSampling
from baton.core.structured_output import StructuredOutput, choice_text
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.sequence import Fork
from baton.engine.sequence import Sequence as Request
from baton.grammar.limits import MAX_CHOICES, MAX_SOURCE_BYTES
from baton.request.limits import MAX_ANSWERS, MAX_BAD_WORD_TOKENS, SamplingLimits
from loadtest.conditions import conditions

HONEST = 4
LIMITS = SamplingLimits()
PROMPT = 32
LONG_PROMPT = 3000
Q = 52
"""The token that the answers repeat where runs of bad words overlap most."""
CALM = ResolvedSampling(max_tokens=1, temperature=0.8, ignore_eos=True)


@dataclass(frozen=True)
class Case:
    """A request with one parameter at its maximum."""

    change: Callable[[int], Mapping[str, object]]
    """The parameters, for a vocabulary of some size."""
    prompt: int = PROMPT
    n: int = MAX_ANSWERS
    also: Mapping[str, object] = field(default_factory=dict)
    """Parameters that the calm request has too."""


def _overlapping(runs: int, length: int) -> tuple[tuple[int, ...], ...]:
    """Runs that share all but their first and last tokens: their last but one too."""
    return tuple((Q,) * (length - 1 - at % 27) + (100 + at,) for at in range(runs))


def _different(runs: int, length: int, vocab: int) -> tuple[tuple[int, ...], ...]:
    """Return runs with as many states as the bound allows."""
    return tuple(
        tuple((at * 31 + place * (at + 7) * 17) % (vocab - 100) + 100 for place in range(length))
        for at in range(runs)
    )


def _schema() -> StructuredOutput:
    properties = {f"p{at}": {"type": "string", "pattern": f"^[a-z]{{1,{at % 30 + 1}}}$"} for at in range(600)}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    text = json.dumps(schema)
    assert len(text) <= MAX_SOURCE_BYTES
    return StructuredOutput("json_schema", text)


def _ambiguous(terminals: int) -> StructuredOutput:
    rules = [f"T{at}: /[a-z ]*[{chr(97 + at % 26)}-z][a-z ]{{{at % 40 + 1}}}/" for at in range(terminals)]
    return StructuredOutput(
        "grammar", "start: (" + " | ".join(f"T{at}" for at in range(terminals)) + ")+\n" + "\n".join(rules)
    )


def _choices() -> StructuredOutput:
    width = MAX_SOURCE_BYTES // MAX_CHOICES - 4
    return StructuredOutput("choice", choice_text([f"{at:0{width}d}" for at in range(MAX_CHOICES)]))


TO_Q = {"logit_bias": ((Q, 100.0),)}
ALL_PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 2.0, "frequency_penalty": 2.0}
FORMED = {"temperature": 1.0}
CASES: Mapping[str, Case] = {
    "bad_words, 500 that overlap": Case(lambda vocab: {"bad_word_ids": _overlapping(1000, 128)}, also=TO_Q),
    "bad_word_ids, as many tokens as allowed": Case(
        lambda vocab: {"bad_word_ids": _different(MAX_BAD_WORD_TOKENS // 128, 128, vocab)}
    ),
    "logit_bias": Case(
        lambda vocab: {"logit_bias": tuple((token, 0.1) for token in range(LIMITS.max_logit_bias))}
    ),
    "allowed_token_ids, all": Case(lambda vocab: {"allowed_token_ids": tuple(range(vocab))}),
    "stop_token_ids and min_tokens": Case(
        lambda vocab: {
            "stop_token_ids": frozenset(range(100, 100 + LIMITS.max_stop_token_ids)),
            "min_tokens": 1 << 20,
        }
    ),
    "penalties, long prompt": Case(lambda vocab: ALL_PENALTIES, LONG_PROMPT),
    "presence_penalty": Case(lambda vocab: {"presence_penalty": 2.0}),
    "top_k": Case(lambda vocab: {"top_k": vocab - 1}),
    "top_p": Case(lambda vocab: {"top_p": 0.999}),
    "min_p": Case(lambda vocab: {"min_p": 1e-6}),
    "top_k, top_p, min_p": Case(lambda vocab: {"top_k": vocab - 1, "top_p": 0.999, "min_p": 1e-6}),
    "temperature": Case(lambda vocab: {"temperature": 2.0}),
    "seed": Case(lambda vocab: {"seed": 2**64 - 1}),
    "logprobs": Case(lambda vocab: {"logprobs": LIMITS.max_logprobs}),
    "prompt_logprobs": Case(lambda vocab: {"prompt_logprobs": LIMITS.max_logprobs}, LONG_PROMPT, n=1),
    "structured_output, schema": Case(lambda vocab: {"structured_output": _schema()}, also=FORMED),
    "structured_output, choice": Case(lambda vocab: {"structured_output": _choices()}, also=FORMED),
    "structured_output, grammar": Case(lambda vocab: {"structured_output": _ambiguous(5)}, also=FORMED),
    "beam search": Case(lambda vocab: {}, n=int(BEAM_WIDTHS.high)),
}
"""Requests by the name of their parameter. ``n``, ``seed`` and the two temperatures are in every request."""


@dataclass(frozen=True)
class Felt:
    """The steps beside one request, in seconds."""

    steps: list[float]
    intake_s: float

    @property
    def median(self) -> float:
        return statistics.median(self.steps)

    @property
    def p99(self) -> float:
        ordered = sorted(self.steps)
        return ordered[min(len(ordered) - 1, round(0.99 * (len(ordered) - 1)))]


class Bench:
    """An engine with honest requests, which have a token in each step."""

    def __init__(self, engine: Engine, tokens: int) -> None:
        self._engine = engine
        self._tokens = tokens
        self._numbers = iter(range(1 << 30))

    def felt(self, case: Case, params: ResolvedSampling, *, beams: bool = False) -> Felt:
        """Return the steps while one request runs, from its arrival on."""
        engine, number = self._engine, next(self._numbers)
        honest = [self._honest(number, at) for at in range(HONEST)]
        while any(seq.num_outputs < 2 for seq in honest):
            engine.step()
        places = range(case.prompt)
        prompt = array("I", ((number * 131 + at * 7) % (engine.vocab_size - 200) + 100 for at in places))
        params = replace(params, max_tokens=self._tokens, min_tokens=min(params.min_tokens, self._tokens))
        if beams:
            params = replace(CALM, max_tokens=self._tokens, temperature=1.0, beam_search=BeamParams(case.n))
        forks = tuple(Fork(f"{number}-{at}", replace(params, seed=at)) for at in range(1, case.n))
        request = Request(f"{number}-0", 1, prompt, params, forks=() if beams else forks)
        began = time.thread_time()
        engine.check(request)
        engine.add(request)
        intake = time.thread_time() - began
        steps: list[float] = []
        began = time.thread_time()
        while len(steps) < self._tokens:
            began = time.thread_time()
            errors = [output.error for output in engine.step() if output.error]
            if errors:
                raise RuntimeError(f"a request was refused: {errors[0]}")
            if request.started:
                steps.append(time.thread_time() - began)
        for seq in honest:
            engine.cancel(seq.request_id, 1)
        for at in range(case.n):
            engine.cancel(f"{number}-{at}", 1)
        while engine.has_work:
            engine.step()
        return Felt(steps, intake)

    def _honest(self, number: int, at: int) -> Request:
        params = ResolvedSampling(max_tokens=1 << 11, temperature=0.8, ignore_eos=True, seed=at)
        seq = Request(f"honest-{number}-{at}", 1, array("I", range(200 + at, 216 + at)), params)
        self._engine.add(seq)
        return seq


def measure(bench: Bench, name: str, vocab: int, rounds: int) -> tuple[float, float, float, float]:
    """Return the ratios of medians and of 99th percentiles, the intake's seconds, and the calm median."""
    case = CASES[name]
    calm = replace(CALM, **case.also)  # type: ignore[arg-type]
    loud = replace(calm, **case.change(vocab))  # type: ignore[arg-type]
    found: list[tuple[float, float, float, float]] = []
    for number in range(-1, rounds):  # the first is to warm up: grammars are compiled
        pair = {"calm": bench.felt(case, calm)} if number % 2 else {}
        pair["loud"] = bench.felt(case, loud, beams=name == "beam search")
        if "calm" not in pair:
            pair["calm"] = bench.felt(case, calm)
        one, other = pair["loud"], pair["calm"]
        if number >= 0:
            found.append((one.median / other.median, one.p99 / other.p99, one.intake_s, other.median))
    first, second, third, fourth = (statistics.median(column) for column in zip(*found, strict=True))
    return first, second, third, fourth


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", action="append", choices=list(CASES), metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokens", type=int, default=100, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--at-most", type=float, default=1.1)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    console = Console(width=160)
    for line in conditions("loadtest.sampling_maxima"):
        console.print(line, soft_wrap=True)
    config = EngineConfig(
        model=hub.resolve_model(chosen.model),
        device="cpu",
        dtype="float32",
        max_num_seqs=MAX_ANSWERS + HONEST,
        max_num_batched_tokens=512,
    )
    engine = Engine.from_config(config)
    bench = Bench(engine, chosen.tokens)
    table = Table("parameter", "answers", "step p50", "step p99", "taken in, ms", "calm step, ms")
    worst = 0.0
    for name in chosen.case or CASES:
        p50, p99, intake, calm = measure(bench, name, engine.vocab_size, chosen.rounds)
        worst = max(worst, p99)
        cells = [f"{p50:.2f} x", f"{p99:.2f} x", f"{intake * 1e3:.1f}", f"{calm * 1e3:.1f}"]
        console.print(name, *cells)
        table.add_row(name, str(CASES[name].n), *cells)
    console.print(table)
    console.print(f"VERDICT: {'ok' if worst <= chosen.at_most else 'FAILED'}")
    engine.close()
    return int(worst > chosen.at_most)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    sys.exit(main())
