"""The program that tries grammars out, for ``baton.grammar.proof``: ``python -m baton.grammar.trial``.

It reads frames from standard input and answers each on standard output: first a ``TokenTable``, then one
``GrammarTrial`` after the other. A frame is a length (4 bytes, big endian) and a msgpack message. A grammar
that takes too long, too much memory or too much stack kills this process only.
"""

from __future__ import annotations

import random
import resource
import signal
import sys
import threading
import time
from dataclasses import replace
from typing import BinaryIO

import msgspec
from llguidance import LLMatcher, LLTokenizer

from baton.core.structured_output import Kind, StructuredOutput
from baton.grammar.errors import GrammarError
from baton.grammar.limits import (
    ALONE_S,
    MASK_CPU_S,
    REHEARSED_TOKENS,
    TRIAL_BYTES,
    TRIAL_CPU_S,
    TRIAL_STACK_BYTES,
    WALKS,
)
from baton.grammar.source import to_llguidance
from baton.grammar.table import TokenTable, compiled, in_one_line, raise_error


class GrammarTrial(msgspec.Struct, frozen=True):
    """A grammar to be tried out."""

    kind: Kind
    text: str
    around: str = ""


class Outcome(msgspec.Struct, frozen=True):
    """The grammar in llguidance's notation, or why it cannot be used."""

    grammar: str = ""
    error: str | None = None
    cpu_s: float = 0.0
    """CPU seconds that the process has used so far."""


def try_out(tokens: LLTokenizer, attempt: GrammarTrial) -> Outcome:
    """Convert and compile a grammar, and walk some of the way that a sequence would go through it."""
    try:
        form = StructuredOutput(attempt.kind, attempt.text)
        if attempt.around:  # a walk of the whole might not reach the form
            _rehearse(compiled(tokens, to_llguidance(form)))
        grammar = to_llguidance(replace(form, around=attempt.around))
        _rehearse(compiled(tokens, grammar))
    except RecursionError:
        return Outcome(error="it is nested too deeply")
    except ValueError as error:  # GrammarError, and errors of converting
        return Outcome(error=in_one_line(str(error)))
    return Outcome(grammar)


def _rehearse(start: LLMatcher) -> None:
    """Compute the first masks, where most limits that hold for each step are exceeded. Raises
    GrammarError."""
    for _ in range(WALKS):
        if _slowest_mask_s(start.deep_copy()) <= MASK_CPU_S:
            return
    raise GrammarError(f"it is too complex: one token's mask takes over {MASK_CPU_S * 1000:g} ms")


def _slowest_mask_s(matcher: LLMatcher) -> float:
    """Return the most CPU seconds of a mask in a random walk, always the same, which ends at the first mask
    that takes too long."""
    choose, slowest = random.Random(0), 0.0
    for _ in range(REHEARSED_TOKENS):
        began = time.thread_time()
        mask = matcher.compute_bitmask()
        slowest = max(slowest, time.thread_time() - began)
        raise_error(matcher)
        if slowest > MASK_CPU_S or matcher.is_stopped():
            break
        matcher.consume_token(_some_token(mask, choose))
        raise_error(matcher)
        if matcher.is_stopped():
            break
    return slowest


def _some_token(mask: bytes, choose: random.Random) -> int:
    """Return a token that ``mask`` (a bit each, little endian) allows. Raises GrammarError if it allows
    none."""
    start = choose.randrange(len(mask))
    rotated = mask[start:] + mask[:start]
    skipped = len(rotated) - len(rotated.lstrip(b"\0"))
    if skipped == len(rotated):
        raise GrammarError("no text can match it")
    byte = rotated[skipped]
    bit = choose.choice([bit for bit in range(8) if byte >> bit & 1])
    return (start + skipped) % len(mask) * 8 + bit


def read_frame(source: BinaryIO) -> bytes | None:
    """Return the next frame's content; None at the end."""
    header = source.read(4)
    return source.read(int.from_bytes(header)) if len(header) == 4 else None


def frame(message: msgspec.Struct) -> bytes:
    content = msgspec.msgpack.encode(message)
    return len(content).to_bytes(4) + content


def _serve(source: BinaryIO, target: BinaryIO) -> None:
    content = read_frame(source)
    if content is None:
        return
    try:
        tokens = msgspec.msgpack.decode(content, type=TokenTable).build().tokenizer
    except ValueError as error:
        _answer(target, Outcome(error=in_one_line(str(error))))
        return
    _answer(target, Outcome())
    attempts = msgspec.msgpack.Decoder(GrammarTrial)
    while (content := read_frame(source)) is not None:
        # Either timer ends this process.
        signal.setitimer(signal.ITIMER_PROF, TRIAL_CPU_S)
        signal.setitimer(signal.ITIMER_REAL, ALONE_S)
        outcome = try_out(tokens, attempts.decode(content))
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _answer(target, outcome)


def _answer(target: BinaryIO, outcome: Outcome) -> None:
    target.write(frame(msgspec.structs.replace(outcome, cpu_s=time.process_time())))
    target.flush()


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (TRIAL_BYTES, TRIAL_BYTES))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.stack_size(TRIAL_STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(sys.stdin.buffer, sys.stdout.buffer))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
