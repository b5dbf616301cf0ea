"""The salts of cached blocks, as workers are told them."""

from __future__ import annotations

import hashlib
import hmac


class CacheSalts:
    """Keys salts with the cluster key: who does not have it cannot find out what a tenant asked by making the
    digests of a guess. All routers of one ring make the same."""

    def __init__(self, cluster_key: bytes) -> None:
        # A key of its own: nothing else that the cluster key signs is ever taken for a salt.
        self._key = hmac.digest(cluster_key, b"baton: cache salts", hashlib.sha256)

    def of(self, sharers: bytes) -> bytes:
        """The salt of ``sharers``, see `Client.cache_salt`; that of everybody stays empty."""
        return hmac.digest(self._key, sharers, hashlib.sha256) if sharers else b""
