"""The names of full KV blocks: digests over their tokens and all before them. Workers keep blocks under them,
and routers look for them; imports no torch."""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterator, Sequence

DIGEST_BYTES = 32
AT_ONCE = 64
"""Blocks whose tokens are laid out together: who asks for few digests of a long prompt pays for few."""


def chain(
    token_ids: Sequence[int] | array[int],
    block_size: int,
    salt: bytes = b"",
    start: int = 0,
    parent: bytes | None = None,
) -> Iterator[bytes]:
    """Digests of the full blocks of ``token_ids`` from token ``start``, each chained over the one before,
    made as they are asked for.

    ``start`` is a multiple of ``block_size`` and ``parent`` the digest of the block that ends there (None at
    0, where the chain begins with ``salt``). BLAKE2b-256 over the parent and the ids as little-endian int64:
    equal digests mean equal tokens from the first on, also for someone who chooses the tokens in order to
    read another's cache.
    """
    full = len(token_ids) // block_size * block_size
    if start >= full:
        return
    if parent is None:
        parent = hashlib.blake2b(salt, digest_size=DIGEST_BYTES, person=b"baton-kv-root").digest()
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
) -> list[bytes]:
    """All of :func:`chain`."""
    return list(chain(token_ids, block_size, salt, start, parent))


def short(digest: bytes) -> int:
    """Its first 64 bits, by which routers know a block. Two blocks that share them would mislead a placement,
    and nothing else."""
    return int.from_bytes(digest[:8], "little")
