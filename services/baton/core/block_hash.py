"""The names of full KV blocks: digests over a block's tokens and all tokens before. Workers keep blocks under
their digests, and routers look digests up. Imports no torch."""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterator, Sequence

DIGEST_BYTES = 32
MOST_DTYPE_BYTES = hashlib.blake2b.SALT_SIZE
"""The most bytes of the name of what blocks hold."""
AT_ONCE = 64
"""Blocks whose tokens are packed together: a caller that takes few digests of a long prompt pays for few."""


def check_kv_dtype(kv_dtype: str) -> None:
    """ValueError for a name that no digest can tell."""
    if len(kv_dtype.encode()) > MOST_DTYPE_BYTES:
        raise ValueError(f"kv_cache_dtype is {kv_dtype!r}; allowed: at most {MOST_DTYPE_BYTES} bytes")


def chain(
    token_ids: Sequence[int] | array[int],
    block_size: int,
    salt: bytes = b"",
    start: int = 0,
    parent: bytes | None = None,
    kv_dtype: str = "",
) -> Iterator[bytes]:
    """Yield the digests of the full blocks of ``token_ids`` from token ``start``, each chained over the
    digest before it.

    ``start`` is a multiple of ``block_size`` and ``parent`` the digest of the block that ends there (None at
    0, where the chain begins with ``salt`` and ``kv_dtype``: what blocks hold in place of numbers of the
    model's type, in at most ``MOST_DTYPE_BYTES``). A digest is BLAKE2b-256 over the parent and the ids as
    little-endian int64: equal digests mean equal tokens from the first on, also for a client that chooses
    its tokens in order to read another client's cache.
    """
    full = len(token_ids) // block_size * block_size
    if start >= full:
        return
    if parent is None:
        root = hashlib.blake2b(
            salt, digest_size=DIGEST_BYTES, person=b"baton-kv-root", salt=kv_dtype.encode()
        )
        parent = root.digest()
    stride = 8 * block_size
    for begin in range(start, full, AT_ONCE * block_size):
        ids = token_ids[begin : min(full, begin + AT_ONCE * block_size)]
        data = struct.pack(f"<{len(ids)}q", *ids)  # four times as fast as an array made of a list
        for at in range(0, len(data), stride):
            parent = hashlib.blake2b(parent + data[at : at + stride], digest_size=DIGEST_BYTES).digest()
            yield parent


def hash_blocks(
    token_ids: Sequence[int] | array[int],
    block_size: int,
    salt: bytes = b"",
    start: int = 0,
    parent: bytes | None = None,
    kv_dtype: str = "",
) -> list[bytes]:
    """Return all digests of :func:`chain`."""
    return list(chain(token_ids, block_size, salt, start, parent, kv_dtype))


def short(digest: bytes) -> int:
    """Return the first 64 bits of a digest, by which routers know a block. Two blocks with the same 64 bits
    can mislead a placement, and nothing else."""
    return int.from_bytes(digest[:8], "little")
