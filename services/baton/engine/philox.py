"""Philox4x32-10, the counter-based random generator of Salmon, Moraes, Dror and Shaw,
"Parallel random numbers: as easy as 1, 2, 3" (SC 2011): ten rounds that mix a counter under a key.

There is no state to carry along or to lose: a draw is a function of (seed, position) and nothing else.
"""

from __future__ import annotations

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


def uniforms(seeds: list[int], positions: list[int]) -> NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits for each (seed, position), both taken modulo 2**64. [n]."""
    words = np.array([[value & 0xFFFFFFFFFFFFFFFF for value in row] for row in (seeds, positions)], np.uint64)
    key, count = np.stack([words & _LOW, words >> _HALF], axis=1)  # each [2, n]: low word, high word
    counter = np.concatenate([count, np.zeros_like(count)])
    high, low = philox4x32(counter, key)[:2]
    result: NDArray[np.float64] = ((high << _HALF | low) >> np.uint64(11)) * 2.0**-53
    return result
