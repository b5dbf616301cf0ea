"""Philox4x32-10, the counter-based random generator of Salmon, Moraes, Dror and Shaw,
"Parallel random numbers: as easy as 1, 2, 3" (SC 2011): ten rounds that mix a counter under a key.

There is no state to carry along or to lose: a draw is a function of key and counter and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_KEY_STEPS = np.arange(_ROUNDS, dtype=np.uint64)[:, None, None] * np.array(
    [[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64
)  # [rounds, 2, 1]


def philox4x32(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Encrypts ``counter`` [4, n] under ``key`` [2, n]; result [4, n]. A word is 32 bits in a uint64."""
    keys = (key + _KEY_STEPS) & _LOW
    even, odd = counter[0::2], counter[1::2]
    for round_key in keys:
        product = even * _MULTIPLIERS
        even = (product >> _HALF)[::-1] ^ odd ^ round_key
        odd = (product & _LOW)[::-1]
    result = np.empty_like(counter)
    result[0::2], result[1::2] = even, odd
    return result


def exponentials(seeds: Sequence[int], positions: Sequence[int], count: int) -> NDArray[np.float64]:
    """``count`` exponentially distributed numbers of mean 1 for each (seed, position), both taken modulo
    2**64: [n, count]. The first ones do not depend on ``count``. At least 2**-33, below 23."""
    counters = -(-count // 4)  # each counter gives four words
    pairs = [[value & 0xFFFFFFFFFFFFFFFF for value in row] for row in (seeds, positions)]
    words = np.repeat(np.array(pairs, np.uint64), counters, axis=1)
    key, position = np.stack([words & _LOW, words >> _HALF], axis=1)  # each [2, n]: low word, high word
    counter = np.zeros((4, words.shape[1]), np.uint64)
    counter[:2], counter[2] = position, np.tile(np.arange(counters, dtype=np.uint64), len(seeds))
    random = philox4x32(counter, key).reshape(4, len(seeds), counters)
    times: NDArray[np.float64] = -np.log1p(-(random + 0.5) * 2.0**-32)  # the middle of a word's interval
    return times.transpose(1, 2, 0).reshape(len(seeds), -1)[:, :count]
