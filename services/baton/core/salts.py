"""The form of the salts of cached blocks: which part of a salt is its tenant's."""

from __future__ import annotations

TENANT_BYTES = 16
"""The first bytes of a salt, which are the same for all groups of a tenant, and for no other's."""
GROUP_BYTES = 16
"""The bytes behind them, which only one group of the tenant has."""


def tenant_of(salt: bytes) -> str:
    """Return a name for the tenant of a salt, which a worker knows it by. Requests without a salt have no
    tenant: they are of routers without keys."""
    return salt[:TENANT_BYTES].hex()
