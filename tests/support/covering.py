"""Choices that together hold every pair of values of every two parameters."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import combinations

Choice = dict[str, object]

CANDIDATES = 20
"""Rows that are tried before the best is taken."""


def covering(levels: Mapping[str, Sequence[object]], seed: int = 0) -> list[Choice]:
    """Rows with a value for each parameter, such that each two values of different parameters are in a row
    together. Greedy: each row is the one of a few that holds most of the pairs still missing."""
    rng = random.Random(seed)
    missing = {
        (a, i, b, j)
        for a, b in combinations(levels, 2)
        for i in range(len(levels[a]))
        for j in range(len(levels[b]))
    }
    names = list(levels)
    rows: list[Choice] = []
    while missing:
        candidates = [_row(levels, missing, rng) for _ in range(CANDIDATES)]
        best = max(candidates, key=lambda row: len(missing & _pairs(names, row)))
        missing -= _pairs(names, best)
        rows.append({name: levels[name][at] for name, at in best.items()})
    return rows


Pair = tuple[str, int, str, int]


def _row(levels: Mapping[str, Sequence[object]], missing: set[Pair], rng: random.Random) -> dict[str, int]:
    """A row around one of the missing pairs, whose other values are chosen one after the other."""
    a, i, b, j = rng.choice(sorted(missing))
    row = {a: i, b: j}
    rest = [name for name in levels if name not in row]
    rng.shuffle(rest)
    for name in rest:
        gains = [len(missing & _pairs(list(levels), {**row, name: at})) for at in range(len(levels[name]))]
        most = max(gains)
        row[name] = rng.choice([at for at, gain in enumerate(gains) if gain == most])
    return row


def _pairs(names: Sequence[str], row: Mapping[str, int]) -> set[Pair]:
    return {(a, row[a], b, row[b]) for a, b in combinations([name for name in names if name in row], 2)}
