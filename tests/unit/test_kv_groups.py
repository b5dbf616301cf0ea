"""What a worker says that its layers keep, and what a router makes of it."""

from __future__ import annotations

import pytest

from baton.core.kv_groups_proto import needs_from_proto
from baton.core.prefix_hit import WHOLE_PREFIX, GroupNeeds
from baton.greeting.proofs import MalformedGreetingError
from baton.router.fleet.compatibility import check_hello
from baton.v1 import worker_pb2 as pb
from baton.worker.kv_groups import groups_of
from baton_kernels.kv_layout import KVLayout, LayerKV, StateKV, TokenKV
from baton_kernels.window import ChunkedWindow

FULL = TokenKV(2, 2, 64)
CASES: list[tuple[LayerKV, GroupNeeds]] = [
    (FULL, GroupNeeds("full")),
    (TokenKV(1, 1, 64), GroupNeeds("latent")),
    (TokenKV(2, 2, 64, 512), GroupNeeds("window", 512)),
    (TokenKV(2, 2, 64, ChunkedWindow(128)), GroupNeeds("window", 128, chunked=True)),
    (StateKV(4, 256), GroupNeeds("state")),
]


@pytest.mark.parametrize(("kv", "needs"), CASES, ids=[str(kv) for kv, _ in CASES])
def test_a_router_hears_what_each_group_of_a_layout_needs(kv: LayerKV, needs: GroupNeeds) -> None:
    alone = groups_of(KVLayout.of([[kv]], 16, 2))
    assert needs_from_proto(alone) == (needs,)
    if kv != FULL:
        both = groups_of(KVLayout.of([[FULL], [kv]], 16, 2))
        assert needs_from_proto(both) == (GroupNeeds("full"), needs)


def test_groups_are_told_in_the_layouts_order() -> None:
    layout = KVLayout.of([[kv] for kv, _ in reversed(CASES)], 16, 2)
    kinds = [group.kind for group in layout.groups]
    assert [needs.kind for needs in needs_from_proto(groups_of(layout))] == kinds
    assert kinds[0] == "full" and kinds[-1] == "state"


def test_a_worker_that_tells_no_groups_keeps_all_tokens() -> None:
    assert needs_from_proto([]) == WHOLE_PREFIX
    assert needs_from_proto(groups_of(KVLayout.of_one(16))) == WHOLE_PREFIX


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        ([pb.KVGroup()], "kv_groups[0].kind: 0 is none that this release knows"),
        ([pb.KVGroup(kind=9)], "kv_groups[0].kind: 9 is none"),  # type: ignore[arg-type]
        (
            [pb.KVGroup(kind=pb.KV_GROUP_KIND_FULL), pb.KVGroup(kind=pb.KV_GROUP_KIND_WINDOW)],
            "kv_groups[1]: a window must be at least 1, not 0",
        ),
        (
            [pb.KVGroup(kind=pb.KV_GROUP_KIND_STATE, window=5)],
            "kv_groups[0]: a group of kind state has no window, but was given window 5, chunked False",
        ),
        (
            [pb.KVGroup(kind=pb.KV_GROUP_KIND_LATENT, chunked=True)],
            "kv_groups[0]: a group of kind latent has no window, but was given window 0, chunked True",
        ),
        ([pb.KVGroup(kind=pb.KV_GROUP_KIND_FULL)] * 257, "kv_groups: at most 256 are allowed, not 257"),
    ],
)
def test_groups_that_no_model_has_are_refused_by_name(groups: list[pb.KVGroup], reason: str) -> None:
    hello = pb.WorkerHello(incarnation="w", role=pb.ROLE_BOTH, kv_groups=groups)
    with pytest.raises(MalformedGreetingError) as caught:
        check_hello(hello)
    assert str(caught.value).startswith(reason)


def test_a_type_of_kv_that_no_digest_tells_is_refused_by_name() -> None:
    hello = pb.WorkerHello(incarnation="w", role=pb.ROLE_BOTH, kv_cache_dtype="a" * 17)
    with pytest.raises(MalformedGreetingError, match=r"kv_cache_dtype is 'a+'; allowed: at most 16"):
        check_hello(hello)
