"""The salts of cached blocks, as they are sent to workers."""

from __future__ import annotations

import hashlib
import hmac

from baton.core.salts import GROUP_BYTES, TENANT_BYTES

_TENANT_DIGEST = hashlib.sha256().digest_size


class CacheSalts:
    """Makes salts with the cluster key: without it, nobody can find out what a tenant asked by computing the
    digests of a guess. All routers of one cluster make the same salts."""

    def __init__(self, cluster_key: bytes) -> None:
        # A derived key: nothing else that the cluster key signs can be taken for a salt.
        self._key = hmac.digest(cluster_key, b"baton: cache salts", hashlib.sha256)

    def of(self, sharers: bytes) -> bytes:
        """Return the salt of ``sharers``, the group of `Client.cache_salt`. The salt of the empty group is
        empty; others begin with what all groups of one tenant share (`baton.core.salts`)."""
        if not sharers:
            return b""
        tenant, group = (
            hmac.digest(self._key, part, hashlib.sha256) for part in (sharers[:_TENANT_DIGEST], sharers)
        )
        return tenant[:TENANT_BYTES] + group[:GROUP_BYTES]
