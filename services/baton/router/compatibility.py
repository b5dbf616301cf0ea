"""Which workers may answer a request together.

While a new release is rolled out, workers of both serve, and a prompt's KV means something only to those that
compute it alike. Workers of one group may be paired; the handshake of a link compares again, field by field.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol, TypeVar

from baton.greeting.proofs import MalformedGreetingError
from baton.names import check_name, check_words
from baton.router.placement import Role, takes_over
from baton.v1 import worker_pb2 as pb


class Group(NamedTuple):
    """What must be the same. Workers that say nothing of one of these are alike in it."""

    model: str
    revision: str
    terms: str
    """A digest of all that the handshake of a link compares, but for the block size."""


class Greeted(Protocol):
    """Whoever has a greeting of a worker."""

    @property
    def hello(self) -> pb.WorkerHello | None: ...


W = TypeVar("W", bound=Greeted)


def check_hello(hello: pb.WorkerHello) -> None:
    """GreetingError, naming the field, if something that a worker calls itself or its model cannot be."""
    try:
        check_name("incarnation", hello.incarnation)
        for field in ("model", "revision", "compatibility", "handoff_address", "tokenizer"):
            check_words(field, getattr(hello, field))
    except ValueError as error:
        raise MalformedGreetingError(str(error)) from None


_ROLES: Mapping[int, Role] = MappingProxyType(
    {pb.ROLE_PREFILL: "prefill", pb.ROLE_DECODE: "decode", pb.ROLE_BOTH: "both"}
)


def role_of(hello: pb.WorkerHello) -> Role:
    return _ROLES[hello.role]


def knows_role(hello: pb.WorkerHello) -> bool:
    """Whether ``role_of`` can tell: a newer release may have others."""
    return hello.role in _ROLES


def group_of(hello: pb.WorkerHello) -> Group:
    return Group(hello.model, hello.revision, hello.compatibility)


def by_group(workers: Iterable[W]) -> dict[Group, list[W]]:
    """The workers that have greeted, each among its like; both in the order given."""
    groups: dict[Group, list[W]] = {}
    for worker in workers:
        if worker.hello is not None:
            groups.setdefault(group_of(worker.hello), []).append(worker)
    return groups


def unpaired(workers: Iterable[W]) -> list[W]:
    """Workers that only prefill, and have nobody to hand on to."""
    return [
        worker
        for like in by_group(workers).values()
        if not any(takes_over(role_of(each.hello)) for each in like if each.hello is not None)
        for worker in like
        if worker.hello is not None and role_of(worker.hello) == "prefill"
    ]
