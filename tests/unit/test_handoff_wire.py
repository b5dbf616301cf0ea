"""The handoff's messages survive the wire; handles, digests and compatibility say what they should."""

from __future__ import annotations

import hashlib
import struct
from array import array
from typing import get_args

import pytest

from baton.core.logprobs import Logprobs, TokenDetails
from baton.greeting.cluster_key import ClusterKeys
from baton.handoff import wire
from baton.handoff.identity import (
    Mismatch,
    compatibility_digest,
    first_mismatch,
    handle_is_valid,
    new_incarnation,
    sign_handle,
    tokens_digest,
)
from baton.handoff.messages import (
    Cancel,
    Credit,
    Decline,
    Drained,
    First,
    Grant,
    LinkId,
    Manifest,
    Name,
    Ready,
    Release,
    Segment,
    SendComplete,
    ToPrefill,
    Withdraw,
)
from baton.v1 import handoff_pb2 as pb

NAME = Name("01J0-Ünïcode", 2**32 - 1)
LINK = LinkId("p" * 32, "d" * 32, 7)
DETAILS = TokenDetails(Logprobs(0, [-0.5], [1])).to_proto().SerializeToString()

TO_DECODE: list[wire.FromPrefill] = [
    Ready(NAME),
    SendComplete(
        NAME,
        Manifest(131_072, bytes(range(32)), 300, 2),
        (First(151_935, DETAILS), First(0)),
        cached_tokens=64,
        checksums=(0, 2**32 - 1),
    ),
    SendComplete(NAME, Manifest(1, b"", 0, 0), ()),
    Drained(NAME, LINK),
    Withdraw(NAME, "cancelled"),
]
TO_PREFILL: list[ToPrefill] = [
    Credit(NAME),
    Decline(NAME, "no room", elsewhere=True),
    Decline(NAME, "never"),
    Grant(NAME, (Segment(2**63, 0, 16), Segment(1, 16, 1))),
    Grant(NAME, ()),
    Release(NAME),
    Cancel(NAME),
]


@pytest.mark.parametrize("message", TO_DECODE, ids=repr)
def test_prefills_messages_survive(message: wire.FromPrefill) -> None:
    data = wire.to_decode(message).SerializeToString()
    assert wire.from_prefill(pb.PrefillMessage.FromString(data), LINK) == message


@pytest.mark.parametrize("message", TO_PREFILL, ids=repr)
def test_decodes_messages_survive(message: ToPrefill) -> None:
    data = wire.to_prefill(message).SerializeToString()
    assert wire.from_decode(pb.DecodeMessage.FromString(data)) == message


def test_a_first_token_whose_details_cannot_be_read_is_no_answer() -> None:
    told = pb.FirstToken(token=7, details=b"\xff")
    message = pb.PrefillMessage(send_complete=pb.SendComplete(firsts=[pb.FirstToken(token=5), told]))
    read = wire.from_prefill(message, LINK)
    assert isinstance(read, SendComplete)
    assert (read.firsts, read.manifest.num_answers) == ((First(5),), 1)


def test_every_kind_is_tried() -> None:
    assert {type(m) for m in TO_DECODE} == set(get_args(wire.FromPrefill))
    assert {type(m) for m in TO_PREFILL} == set(get_args(ToPrefill))


@pytest.mark.parametrize(
    "message",
    [
        pb.PrefillMessage(),
        pb.PrefillMessage(heartbeat=pb.Heartbeat()),
        pb.PrefillMessage(open=pb.LinkOpen()),
        pb.PrefillMessage(ask=pb.Ask()),
    ],
)
def test_what_is_not_for_decodes_machine_is_passed_over(message: pb.PrefillMessage) -> None:
    assert wire.from_prefill(message, LINK) is None


@pytest.mark.parametrize(
    "message",
    [
        pb.DecodeMessage(),
        pb.DecodeMessage(heartbeat=pb.Heartbeat()),
        pb.DecodeMessage(accept=pb.LinkAccept()),
        pb.DecodeMessage(refuse=pb.LinkRefuse()),
    ],
)
def test_what_is_not_for_prefills_machine_is_passed_over(message: pb.DecodeMessage) -> None:
    assert wire.from_decode(message) is None


def test_drained_of_another_epoch_is_not_drained_of_this_link() -> None:
    message = wire.to_decode(Drained(NAME, LINK._replace(epoch=6)))
    read = wire.from_prefill(message, LINK)
    assert isinstance(read, Drained)
    assert read.link != LINK


class TestHandles:
    KEY = b"a key of the cluster"
    HANDLE = sign_handle(KEY, NAME, "decode", 100)

    def test_the_signed_one_is_valid(self) -> None:
        assert handle_is_valid(self.HANDLE, ClusterKeys(self.KEY), NAME, "decode", 100)

    @pytest.mark.parametrize(
        ("key", "name", "decode", "num_tokens"),
        [
            (b"another key", NAME, "decode", 100),
            (KEY, NAME._replace(attempt=1), "decode", 100),
            (KEY, NAME._replace(request_id="01J1"), "decode", 100),
            (KEY, NAME, "decode restarted", 100),
            (KEY, NAME, "decode", 101),
        ],
        ids=["key", "attempt", "request", "incarnation", "length"],
    )
    def test_it_is_valid_for_nothing_else(self, key: bytes, name: Name, decode: str, num_tokens: int) -> None:
        assert not handle_is_valid(self.HANDLE, ClusterKeys(key), name, decode, num_tokens)

    @pytest.mark.parametrize("handle", [b"", bytes(32), HANDLE[:-1], HANDLE + b"\0"], ids=len)
    def test_a_forged_one_is_not_valid(self, handle: bytes) -> None:
        assert not handle_is_valid(handle, ClusterKeys(self.KEY), NAME, "decode", 100)

    def test_it_is_valid_by_the_key_before_as_well(self) -> None:
        assert handle_is_valid(self.HANDLE, ClusterKeys(b"newer", self.KEY), NAME, "decode", 100)
        assert not handle_is_valid(self.HANDLE, ClusterKeys(b"newer"), NAME, "decode", 100)


def test_tokens_digest_is_of_the_ids_as_words() -> None:
    ids = [0, 1, 151_935, 2**32 - 1]
    expected = hashlib.sha256(struct.pack("<4I", *ids)).digest()
    assert tokens_digest(ids) == tokens_digest(tuple(ids)) == tokens_digest(array("q", ids)) == expected
    assert tokens_digest([]) == hashlib.sha256(b"").digest()
    assert tokens_digest([1, 2]) != tokens_digest([2, 1])


def test_an_incarnation_is_new_each_time() -> None:
    made = {new_incarnation() for _ in range(100)}
    assert len(made) == 100
    assert all(len(bytes.fromhex(incarnation)) == 16 for incarnation in made)


FULL = pb.KVGroupSpec(kind="full", heads=8, layers=4, vectors=2, dim=128)
WINDOW = pb.KVGroupSpec(kind="window", window=512, heads=8, layers=28, vectors=2, dim=128)


def compatibility(**changes: str | int | list[pb.KVGroupSpec]) -> pb.Compatibility:
    fields: dict[str, object] = {
        "protocol": 1,
        "model": "llama",
        "revision": "main",
        "kv_dtype": "bfloat16",
        "layout": "nhlkbd",
        "block_size": 16,
        "groups": [FULL, WINDOW],
    }
    return pb.Compatibility(**(fields | changes))  # type: ignore[arg-type]


def test_equal_workers_match() -> None:
    assert first_mismatch(compatibility(), compatibility()) is None


@pytest.mark.parametrize(
    "field", [f.name for f in pb.Compatibility.DESCRIPTOR.fields if f.name not in ("block_size", "groups")]
)
def test_a_mismatch_names_the_field_and_both_values(field: str) -> None:
    ours = getattr(compatibility(), field)
    other = "other" if isinstance(ours, str) else 99
    assert first_mismatch(compatibility(), compatibility(**{field: other})) == Mismatch(field, ours, other)


@pytest.mark.parametrize("field", [f.name for f in pb.KVGroupSpec.DESCRIPTOR.fields])
def test_a_mismatch_of_groups_names_group_and_field(field: str) -> None:
    ours, other = getattr(WINDOW, field), "latent" if field == "kind" else field == "chunked" or 77
    changed = pb.KVGroupSpec()
    changed.CopyFrom(WINDOW)
    setattr(changed, field, other)
    theirs = compatibility(groups=[FULL, changed])
    assert first_mismatch(compatibility(), theirs) == Mismatch(f"groups[1].{field}", ours, other)
    assert compatibility_digest(compatibility()) != compatibility_digest(theirs)


def test_blocks_with_scales_of_their_own_fit_blocks_of_their_size_alone() -> None:
    sizes = [{"block_size": size} for size in (16, 32)]
    plain = {compatibility_digest(compatibility(**size)) for size in sizes}
    scaled = {compatibility_digest(compatibility(kv_dtype="fp8-dynamic", **size)) for size in sizes}
    assert (len(plain), len(scaled)) == (1, 2)


def test_a_group_too_many_is_a_mismatch() -> None:
    theirs = compatibility(groups=[FULL])
    assert first_mismatch(compatibility(), theirs) == Mismatch("groups", "full, window", "full")
