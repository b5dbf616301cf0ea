"""The groups of workers that may answer a request together.

While a new release is rolled out, workers of both releases serve, and a prompt's KV means something only to
workers that compute it alike. Workers of one group may be paired; the handshake of a link compares again,
field by field.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol, TypeVar

from baton.core.block_hash import check_kv_dtype
from baton.core.kv_groups_proto import needs_from_proto
from baton.core.role import Role, may_decode, takes_over
from baton.core.role_proto import role_from_proto
from baton.greeting.names import check_name, check_words
from baton.greeting.proofs import MalformedGreetingError
from baton.v1 import worker_pb2 as pb


class CompatibilityKey(NamedTuple):
    """The fields in which paired workers must be equal. Workers that leave a field empty are equal in it."""

    model: str
    revision: str
    terms: str
    """A digest of all fields that the handshake of a link compares, without the block size."""


MAX_CONVERTS = 8
"""Most terms, beside its own, on which a worker takes KV over: one for each type of KV."""


class Greeted(Protocol):
    """Anything that holds the greeting of a worker."""

    @property
    def hello(self) -> pb.WorkerHello | None: ...


W = TypeVar("W", bound=Greeted)


def check_hello(hello: pb.WorkerHello) -> None:
    """Raises GreetingError, naming the field, if a name of the worker or its model is malformed, or its KV
    groups or their type are none that a model can have."""
    try:
        check_name("incarnation", hello.incarnation)
        for field in ("model", "revision", "compatibility", "handoff_address", "tokenizer"):
            check_words(field, getattr(hello, field))
        needs_from_proto(hello.kv_groups)
        check_kv_dtype(hello.kv_cache_dtype)
        if len(hello.converts) > MAX_CONVERTS:
            raise ValueError(f"converts: at most {MAX_CONVERTS} are allowed, not {len(hello.converts)}")
        for terms in hello.converts:
            check_words("converts", terms)
    except ValueError as error:
        raise MalformedGreetingError(str(error)) from None


def role_of(hello: pb.WorkerHello) -> Role:
    """Return the role of a greeting whose role has been checked."""
    role = role_from_proto(hello.role)
    assert role is not None
    return role


def group_of(hello: pb.WorkerHello) -> CompatibilityKey:
    return CompatibilityKey(hello.model, hello.revision, hello.compatibility)


def taken_from(hello: pb.WorkerHello) -> list[CompatibilityKey]:
    """Return the other groups whose prefill workers hand over to this worker: it converts their KV."""
    others = [terms for terms in dict.fromkeys(hello.converts) if terms != hello.compatibility]
    return [CompatibilityKey(hello.model, hello.revision, terms) for terms in others]


def by_group(workers: Iterable[W]) -> dict[CompatibilityKey, list[W]]:
    """Group the workers that have greeted; groups, and the workers in them, are in the order given."""
    groups: dict[CompatibilityKey, list[W]] = {}
    for worker in workers:
        if worker.hello is not None:
            groups.setdefault(group_of(worker.hello), []).append(worker)
    return groups


def pairings(workers: Iterable[W]) -> list[tuple[list[W], list[W]]]:
    """Return, for each group, its workers and all workers that take over from them: those of the group, and
    those of others that convert its KV. Workers whose transfers are compared are apart, as nobody converts
    what they send."""
    groups = by_group(workers)
    own: dict[CompatibilityKey, list[W]] = {group: [] for group in groups}
    guests: dict[CompatibilityKey, list[W]] = {group: [] for group in groups}
    for group, like in groups.items():
        for worker in like:
            if worker.hello is None or not takes_over(role_of(worker.hello)):
                continue
            own[group].append(worker)
            for taken in taken_from(worker.hello):
                if taken in guests:
                    guests[taken].append(worker)
    found: list[tuple[list[W], list[W]]] = []
    for group, like in groups.items():
        if not guests[group]:
            found.append((like, own[group]))
            continue
        compared = [worker for worker in like if worker.hello is not None and worker.hello.verifies]
        others = [worker for worker in like if worker not in compared]
        found += [
            (some, takers)
            for some, takers in ((others, own[group] + guests[group]), (compared, own[group]))
            if some
        ]
    return found


def unpaired(workers: Iterable[W]) -> list[W]:
    """Return the prefill workers that no worker takes over from."""
    return [
        worker
        for like, takers in pairings(workers)
        if not takers
        for worker in like
        if worker.hello is not None and not may_decode(role_of(worker.hello))
    ]
