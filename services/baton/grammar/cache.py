"""The compiled grammars that are kept, in a share for each tenant. Pure: no I/O, no clock."""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.core.structured_output import StructuredOutput
from baton.grammar.table import Grammar


class GrammarKey(NamedTuple):
    """The name of a grammar. Tenants share none: else the time that it takes would tell one of them whether
    another uses the same."""

    tenant: str
    output: StructuredOutput


@dataclass(slots=True)
class _Share:
    """The grammars of one tenant, the least recently used first."""

    grammars: OrderedDict[StructuredOutput, Future[Grammar]] = field(default_factory=OrderedDict)
    num_bytes: int = 0


class GrammarCache:
    """Keeps the grammars that were used last.

    One tenant alone has room for as many as there may be. Where they are too many, the tenant that has the
    most loses the one that it has used least recently; so nobody's are lost to another who has more.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        """``most`` grammars, with sources of ``most_bytes``, of all tenants."""
        self._most = most
        self._most_bytes = most_bytes
        self._shares: dict[str, _Share] = {}
        self._count = 0
        self._bytes = 0

    def keep(self, key: GrammarKey, grammar: Future[Grammar]) -> None:
        """Keep a grammar, which was used just now."""
        self._forget(key)
        share = self._shares.setdefault(key.tenant, _Share())
        share.grammars[key.output] = grammar
        self._add(share, key.output, 1)
        while self._count > self._most:
            self._forget_of(max(self._shares, key=lambda tenant: len(self._shares[tenant].grammars)))
        while self._bytes > self._most_bytes:
            self._forget_of(max(self._shares, key=lambda tenant: self._shares[tenant].num_bytes))

    def _forget_of(self, tenant: str) -> None:
        self._forget(GrammarKey(tenant, next(iter(self._shares[tenant].grammars))))

    def _forget(self, key: GrammarKey) -> None:
        share = self._shares.get(key.tenant)
        if share is None or share.grammars.pop(key.output, None) is None:
            return
        self._add(share, key.output, -1)
        if not share.grammars:
            del self._shares[key.tenant]

    def _add(self, share: _Share, output: StructuredOutput, sign: int) -> None:
        size = sign * (len(output.text) + len(output.around))
        share.num_bytes += size
        self._bytes += size
        self._count += sign
