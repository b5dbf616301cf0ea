"""The types of K and V, by torch's names, and which of them a pool can take from a peer. Imports no torch."""

from __future__ import annotations

from typing import Literal

KVConvert = Literal["none", "allow"]
"""``--kv-convert``: whether KV of another type than the pool's is converted when it arrives, or refused."""

FP8 = "float8_e4m3fn"
FP8_DYNAMIC = "fp8-dynamic"
"""FP8 with a scale for each block and head, in the block."""
PLAIN = ("bfloat16", "float16", "float32")
_BYTES = {FP8: 1, "bfloat16": 2, "float16": 2, "float32": 4}


def convertible_to(kv_dtype: str) -> tuple[str, ...]:
    """Return the other types of which a pool of ``kv_dtype`` can take K and V: FP8 from types that models
    compute in, and these from FP8."""
    if kv_dtype == FP8:
        return PLAIN
    return (FP8,) if kv_dtype in PLAIN else ()


def arriving_bytes(arrives_as: str, own: int) -> int:
    """Return the size of a number that arrives as this type; ``own``: that of the pool's, which counts where
    nothing is converted. Raises ValueError for a type that is never converted."""
    if not arrives_as:
        return own
    if arrives_as not in _BYTES:
        raise ValueError(f"arrives_as is {arrives_as!r}; allowed: {', '.join(_BYTES)}")
    return _BYTES[arrives_as]
