"""What a request with each sampling parameter at its maximum costs the router's event loop.

    python -m loadtest.router_maxima [--repeats 5]

Each line is the least CPU time of some repeats, in milliseconds. "read": the parameters are checked and
resolved, where a body of over 16 KiB is read by another process and a gRPC call's bad words in many turns.
"step": the router takes one token of each of the most answers that a request may have, in text, beside the
same without the parameter. Writing them to the client is not in it: each answer's chunk is a turn of its own.
"""

from __future__ import annotations

import argparse
import random
import string
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from baton import hub
from baton.core.logprobs import Logprobs, TokenDetails
from baton.core.sampling_params import ResolvedSampling, SamplingFields
from baton.request.limits import MAX_ANSWERS, ModelInfo, SamplingLimits
from baton.request.sampling import resolve
from baton.text.choice import ChoiceText, TokenChunk
from baton.text.stop import StopMatcher, StopStrings
from baton.text.tokenizer import Tokenizer
from loadtest.conditions import conditions

LIMITS = SamplingLimits()
STOPS = [chr(97 + at) * (LIMITS.max_stop_chars - 1) + "." for at in range(LIMITS.max_stop_strings)]
"""Stop strings of which an answer of one letter is always a beginning."""
LETTER, STEPS = "a", 20


def least(what: Callable[[], object], repeats: int) -> float:
    """Return the least CPU time of ``what``, in milliseconds."""
    taken = []
    for _ in range(repeats):
        began = time.thread_time()
        what()
        taken.append(time.thread_time() - began)
    return 1e3 * min(taken)


def words(alphabet: str) -> list[str]:
    choose = random.Random(0)
    return [
        "".join(choose.choices(alphabet, k=LIMITS.max_bad_word_chars)) for _ in range(LIMITS.max_bad_words)
    ]


def readings(vocab: int) -> Mapping[str, Mapping[str, Any]]:
    """Return the fields of requests, by name."""
    runs = tuple(
        tuple((at * 31 + place) % vocab for place in range(LIMITS.max_bad_word_chars))
        for at in range(LIMITS.max_bad_words)
    )
    return {
        "none": {},
        "bad_words, letters": {"bad_words": words(string.ascii_letters)},
        "bad_words, digits": {"bad_words": words(string.digits)},
        "bad_word_ids (gRPC)": {"bad_word_ids": runs},
        "logit_bias": {"logit_bias": {str(at): 1.0 for at in range(LIMITS.max_logit_bias)}},
        "allowed_token_ids": {"allowed_token_ids": list(range(vocab))},
        "stop_token_ids": {"stop_token_ids": list(range(LIMITS.max_stop_token_ids))},
        "stop": {"stop": STOPS},
    }


def read(fields: Mapping[str, Any], model: ModelInfo, tokenizer: Tokenizer) -> ResolvedSampling:
    asked = {name: value for name, value in fields.items() if name != "bad_word_ids"}
    return resolve(
        SamplingFields(**asked),
        model,
        LIMITS,
        tokenizer,
        prompt_tokens=1,
        default_max_tokens=16,
        bad_word_ids=fields.get("bad_word_ids", ()),
    )


def step_ms(tokenizer: Tokenizer, stops: StopStrings | None, num_top: int | None, repeats: int) -> float:
    """Return the milliseconds for a token of each answer."""
    [token] = tokenizer.encode(LETTER, add_special_tokens=False)
    params = ResolvedSampling(max_tokens=1 << 20, logprobs=num_top)
    answers = [
        ChoiceText(params, tokenizer.detokenizer(), None if stops is None else StopMatcher(stops))
        for _ in range(MAX_ANSWERS)
    ]
    told = None
    if num_top is not None:
        told = TokenDetails(Logprobs(num_top, [-1.0], [1], list(range(num_top)), [-1.0] * num_top))
    chunk = TokenChunk((token,), details=told)

    def steps() -> None:
        for _ in range(STEPS):
            for answer in answers:
                answer.add(chunk)

    return least(steps, repeats) / STEPS


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--repeats", type=int, default=5)
    chosen = parser.parse_args(arguments)
    console = Console(width=120)
    for line in conditions("loadtest.router_maxima"):
        console.print(line, soft_wrap=True)
    tokenizer = Tokenizer.from_dir(hub.resolve_model(chosen.model))
    model = ModelInfo("demo", "", max_model_len=4096, vocab_size=tokenizer.vocab_size)
    table = Table("read", "ms")
    for name, fields in readings(model.vocab_size).items():
        taken = least(lambda fields=fields: read(fields, model, tokenizer), chosen.repeats)  # type: ignore[misc]
        table.add_row(name, f"{taken:.1f}")
    table.add_row("stop, compiled", f"{least(lambda: StopStrings(STOPS), chosen.repeats):.1f}")
    console.print(table)
    steps = Table(f"step of {MAX_ANSWERS} answers", "ms")
    for name, stops, num_top in (
        ("none", None, None),
        ("stop", StopStrings(STOPS), None),
        ("logprobs", None, LIMITS.max_logprobs),
    ):
        steps.add_row(name, f"{step_ms(tokenizer, stops, num_top, chosen.repeats):.2f}")
    console.print(steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
