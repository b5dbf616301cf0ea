"""The client of a request."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from baton.core.priority import MAX_PRIORITY
from baton.router.shared.limits import Tenant

_SALT = b"baton-cache-salt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """The client that a request's key identifies. Without keys, all requests are of the same client."""

    tenant: Tenant
    key: str | None = None
    """The key's name, for logs. None: there are no keys."""
    models: frozenset[str] | None = None
    """The models that the client may use. None: all."""
    operator: bool = False
    """Whether the client may see the requests of all tenants, and the workers."""
    most_urgent: int = -MAX_PRIORITY
    """The lowest ``priority`` value that the client's requests may have."""

    def may_ask(self, model: str) -> bool:
        return self.models is None or model in self.models

    def cache_salt(self, given: str | None) -> bytes:
        """Return the group of requests that share cached blocks: with keys, those of one tenant that give the
        same salt. It is a digest of the tenant (of nothing, without keys) and one of both, in which tenant
        and salt have separate parts, so that no client's salt yields another tenant's group. It contains no
        secret: `CacheSalts` adds one."""
        if self.key is None and not given:
            return b""
        tenant = hashlib.sha256(b"" if self.key is None else self.tenant.name.encode()).digest()
        return tenant + hashlib.sha256(_SALT + tenant + (given or "").encode()).digest()
