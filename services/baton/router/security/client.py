"""Who asks."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from baton.router.shared.limits import Tenant
from baton.urgency import MOST_PRIORITY

_SALT = b"baton-cache-salt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """What a request's key says of it; without keys, everybody is the same one."""

    tenant: Tenant
    key: str | None = None
    """The key's name, for logs; None: there are no keys."""
    models: frozenset[str] | None = None
    """Those it may ask; None: all."""
    operator: bool = False
    """It may hear of all tenants' requests, and of workers."""
    most_urgent: int = -MOST_PRIORITY
    """The least ``priority`` that its requests may have."""

    def may_ask(self, model: str) -> bool:
        return self.models is None or model in self.models

    def cache_salt(self, given: str | None) -> bytes:
        """Among whom cached blocks are shared: with keys, its tenant alone, and within it those requests that
        give the same salt. Both have a part of their own in the digest, so that no salt that a client gives
        is another tenant's. There is no secret in it: that is for `CacheSalts` to add."""
        if self.key is None and not given:
            return b""
        tenant = b"" if self.key is None else hashlib.sha256(self.tenant.name.encode()).digest()
        return hashlib.sha256(_SALT + tenant + (given or "").encode()).digest()
