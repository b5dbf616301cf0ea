"""The traces: conversations of one request or more, each with its moment."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass

VOCABULARY = 1 << 17
Lengths = Callable[[random.Random], int]


@dataclass(frozen=True, slots=True)
class Turn:
    """A user's message, after a pause, and the length of its answer."""

    pause_s: float
    message: array[int]
    outputs: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation. Each turn's prompt is everything said before, and its message."""

    begins_s: float
    turns: tuple[Turn, ...]


def lognormal(median: float, sigma: float, least: int, most: int) -> Lengths:
    """Return bounded lengths, right-skewed as real lengths are."""
    return lambda draw: min(most, max(least, round(median * draw.lognormvariate(0.0, sigma))))


def tokens(draw: random.Random, count: int) -> array[int]:
    """Return tokens that occur in no other prompt."""
    return array("q", (draw.randrange(VOCABULARY) for _ in range(count)))


def moments(draw: random.Random, per_s: float, seconds: float) -> Iterator[float]:
    """Yield the moments of a Poisson process."""
    now = draw.expovariate(per_s)
    while now < seconds:
        yield now
        now += draw.expovariate(per_s)


def single(
    seed: int, per_s: float, seconds: float, kinds: tuple[tuple[Lengths, Lengths], ...]
) -> list[Conversation]:
    """Return requests that share nothing, of kinds that are equally frequent: prompt and answer lengths."""
    draw = random.Random(seed)
    found = []
    for at in moments(draw, per_s, seconds):
        prompt, outputs = draw.choice(kinds)
        turn = Turn(0.0, tokens(draw, prompt(draw)), outputs(draw))
        found.append(Conversation(at, (turn,)))
    return found


def multi_turn(seed: int, per_s: float, seconds: float) -> list[Conversation]:
    """Return chats: a first message of some 800 tokens, then some 200 more each turn; 1 to 12 turns, 5 in the
    mean; answers of some 180 tokens; the user takes some 8 s."""
    draw = random.Random(seed)
    first, later = lognormal(800, 0.8, 32, 8000), lognormal(200, 0.8, 8, 4000)
    outputs = lognormal(180, 0.6, 8, 1000)
    found = []
    for at in moments(draw, per_s, seconds):
        count = min(12, 1 + int(draw.expovariate(1 / 4.5)))
        turns = [Turn(0.0, tokens(draw, first(draw)), outputs(draw))]
        for _ in range(count - 1):
            turns.append(Turn(draw.expovariate(1 / 8), tokens(draw, later(draw)), outputs(draw)))
        found.append(Conversation(at, tuple(turns)))
    return found


def shared_prefix(seed: int, per_s: float, seconds: float, documents: int = 400) -> list[Conversation]:
    """Return questions about documents of some 4,000 tokens: of ``documents``, the k-th is asked about k^-0.8
    times as often as the first, as with pages of the web. A question has some 100 tokens, an answer some 120.
    The documents together fit about into the pools of the prefill workers, and not into the pool of one."""
    draw = random.Random(seed)
    length, question = lognormal(4000, 0.4, 500, 12_000), lognormal(100, 0.5, 8, 1000)
    outputs = lognormal(120, 0.6, 8, 600)
    library = [tokens(draw, length(draw)) for _ in range(documents)]
    weights = [rank**-0.8 for rank in range(1, documents + 1)]
    found = []
    for at in moments(draw, per_s, seconds):
        [document] = draw.choices(library, weights)
        found.append(Conversation(at, (Turn(0.0, document + tokens(draw, question(draw)), outputs(draw)),)))
    return found
