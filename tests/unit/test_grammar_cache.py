"""Compiled grammars are a tenant's own, and no tenant's flood takes another's from the cache."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from weakref import WeakValueDictionary

import pytest

from baton.core.salts import tenant_of
from baton.core.structured_output import StructuredOutput
from baton.grammar.cache import GrammarCache, GrammarKey
from baton.grammar.compiler import GrammarCompiler
from baton.grammar.table import Grammar, TokenTable
from baton.router.security.client import Client
from baton.router.security.salts import CacheSalts
from baton.router.shared.limits import Tenant
from baton.text.tokenizer import Tokenizer
from tests.support.tiny_models import EOS, VOCAB_SIZE, save_byte_tokenizer

MOST, MOST_BYTES = 20, 200


class Kept:
    """A cache, and what it still has."""

    def __init__(self) -> None:
        self._cache = GrammarCache(MOST, MOST_BYTES)
        self._alive: WeakValueDictionary[GrammarKey, Future[Grammar]] = WeakValueDictionary()

    def use(self, tenant: str, name: str) -> None:
        key = GrammarKey(tenant, StructuredOutput("regex", name))
        future = self._alive.get(key)
        if future is None:
            future = self._alive[key] = Future()
        self._cache.keep(key, future)

    def of(self, tenant: str) -> list[str]:
        return sorted(key.output.text for key in self._alive if key.tenant == tenant)


def test_one_tenant_alone_may_have_all_of_it() -> None:
    kept = Kept()
    for number in range(100, 200):
        kept.use("acme", f"{number}")
    assert kept.of("acme") == [f"{number}" for number in range(200 - MOST, 200)]


def test_what_was_used_last_is_kept() -> None:
    kept = Kept()
    for number in range(100, 200):
        kept.use("acme", f"{number}")
        kept.use("acme", "old")
    assert "old" in kept.of("acme")


@pytest.mark.parametrize("size", [1, 60])
def test_a_flood_takes_nothing_from_who_has_less(size: int) -> None:
    kept = Kept()
    kept.use("acme", "a")
    kept.use("acme", "b")
    for number in range(1000):
        kept.use("evil", f"{number:0{size}d}")
    assert kept.of("acme") == ["a", "b"]
    assert len(kept.of("evil")) == (MOST - 2 if size == 1 else 3)


def test_who_has_most_makes_room_for_others() -> None:
    kept = Kept()
    for number in range(MOST):
        kept.use("acme", f"{number}")
    for number in range(1000):
        kept.use("evil", f"{number}")
    assert len(kept.of("acme")) == len(kept.of("evil")) == MOST // 2


# --- the compiler


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrammarCompiler]:
    path: Path = tmp_path_factory.mktemp("tokenizer")
    save_byte_tokenizer(path)
    tokenizer = Tokenizer.from_dir(path)
    compiler = GrammarCompiler(lambda: TokenTable.of(tokenizer, VOCAB_SIZE, [EOS]))
    yield compiler
    compiler.close()


@pytest.mark.parametrize("text", ["a+b", "("], ids=["taken", "refused"])
def test_a_tenant_gets_what_it_has_used_and_nothing_of_others(compiler: GrammarCompiler, text: str) -> None:
    form = StructuredOutput("regex", text)
    ours = compiler.compile(form, "acme")
    refused = ours.exception(120) is not None
    assert refused == (text == "(")
    before = compiler.stats()
    assert compiler.compile(form, "acme") is ours
    theirs = compiler.compile(form, "evil")
    assert theirs is not ours
    assert (theirs.exception(120) is not None) == refused
    after = compiler.stats()
    tried = (after.compiled - before.compiled, after.refused - before.refused)
    assert tried == ((0, 1) if refused else (1, 0)), "tried out for the other tenant too"
    assert (after.cache_hits - before.cache_hits, after.cache_misses - before.cache_misses) == (1, 1)


# --- what a worker knows of a tenant


def test_a_salt_tells_workers_which_requests_are_of_one_tenant() -> None:
    salts = CacheSalts(b"a cluster key of a ring")
    one, other = (Client(tenant=Tenant(name), key="k") for name in ("acme", "evil"))
    nobody = Client(tenant=Tenant())
    named = {
        who: {tenant_of(salts.of(client.cache_salt(given))) for given in (None, "s", "t")}
        for who, client in (("one", one), ("other", other))
    }
    assert len(named["one"]) == len(named["other"]) == 1
    assert named["one"] != named["other"]
    assert {tenant_of(salts.of(nobody.cache_salt(given))) for given in ("s", "t")}.isdisjoint(
        named["one"] | named["other"]
    )
    assert tenant_of(salts.of(nobody.cache_salt(None))) == ""
    clients = (one, other, nobody)
    assert len({salts.of(who.cache_salt(given)) for who in clients for given in (None, "s", "t")}) == 9
