"""All attacks on running rings."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from loadtest.hostile import bodies, floods, heads, probing, strangers, tenants, work
from loadtest.hostile.vocabulary import Attack

ATTACKS: Mapping[str, Attack] = MappingProxyType(
    {
        attack.name: attack
        for part in (floods, heads, bodies, tenants, strangers, probing, work)
        for attack in part.ATTACKS
    }
)
