"""Messages that are too long for a worker's port, in parts and back."""

from __future__ import annotations

from typing import TypeVar

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.net import message_parts
from baton.net.message_parts import (
    MAX_WHOLE_BYTES,
    PIECE_BYTES,
    Joiner,
    MessagePartsError,
    MessageTooLongError,
    in_parts,
)
from baton.v1 import handoff_pb2
from baton.v1 import worker_pb2 as pb
from baton.v1.parts_pb2 import MessagePart

M = TypeVar("M", pb.RouterMessage, handoff_pb2.PrefillMessage)
LONG = 1 << 30


def submit(num_bytes: int, name: str = "r") -> pb.RouterMessage:
    return pb.RouterMessage(submit=pb.Submit(request_id=name, cache_salt=bytes(num_bytes)))


def part(data: bytes, last: bool = False) -> pb.RouterMessage:
    return pb.RouterMessage(part=MessagePart(data=data, last=last))


def joined(joiner: Joiner[M], sent: list[bytes]) -> list[M]:
    return [whole for each in sent if (whole := joiner.read(each)) is not None]


def of_size(num_bytes: int) -> pb.RouterMessage:
    """A message of so many bytes."""
    message = submit(num_bytes - 100)
    return submit(num_bytes - 100 + num_bytes - len(message.SerializeToString()))


@pytest.mark.parametrize("more", [0, 1])
def test_what_fits_goes_whole(more: int) -> None:
    message = of_size(MAX_WHOLE_BYTES + more)
    sent = list(in_parts(message))
    assert len(sent) == 1 + more
    assert (sent == [message.SerializeToString()]) == (not more)
    assert joined(Joiner(pb.RouterMessage, LONG), sent) == [message]


def test_no_part_is_longer_than_what_goes_whole() -> None:
    sent = list(in_parts(of_size(7 * PIECE_BYTES)))
    assert len(sent) == 7 and all(PIECE_BYTES < len(each) <= MAX_WHOLE_BYTES for each in sent)
    ask = handoff_pb2.PrefillMessage(ask=handoff_pb2.Ask(prompt_ids=[1 << 20] * (1 << 18)))
    parts = list(in_parts(ask))
    assert len(parts) == 7 and joined(Joiner(handoff_pb2.PrefillMessage, LONG), parts) == [ask]


def test_a_short_message_is_handed_on_itself() -> None:
    """Nothing is copied of it, and nothing parsed anew."""
    message = submit(10)
    assert Joiner(pb.RouterMessage, LONG).join(message) is message


def test_the_parts_of_a_message_are_bounded_together() -> None:
    joiner = Joiner(pb.RouterMessage, 1000)
    assert joiner.join(part(bytes(600))) is None
    with pytest.raises(MessageTooLongError, match=r"part: .* 1001 bytes or more; at most 1000 are allowed"):
        joiner.join(part(bytes(401)))
    assert joiner._begun is None, "what was refused is kept"
    message = of_size(1000)
    assert joined(joiner, [part(message.SerializeToString(), last=True).SerializeToString()]) == [message]


def test_nothing_comes_between_parts() -> None:
    joiner = Joiner(pb.RouterMessage, LONG)
    assert joiner.join(part(b"x")) is None
    with pytest.raises(MessagePartsError, match=r"part: .* must come before heartbeat"):
        joiner.join(pb.RouterMessage(heartbeat=pb.RouterHeartbeat()))
    assert joiner._begun is None


@pytest.mark.parametrize("data", [b"\x0a\xff", part(b"", last=True).SerializeToString()])
def test_parts_that_make_no_message(data: bytes) -> None:
    joiner = Joiner(pb.RouterMessage, LONG)
    assert joiner.join(part(data[:1])) is None
    with pytest.raises(DecodeError):
        joiner.join(part(data[1:], last=True))
    assert joiner._begun is None


def test_a_streams_first_messages_are_not_joined() -> None:
    """A stranger's: nothing is kept of them."""
    joiner = Joiner(pb.RouterMessage, LONG, unjoined=2)
    for _ in range(2):
        message = part(b"x")
        assert joiner.join(message) is message
    assert joiner._begun is None
    assert joiner.join(part(b"x")) is None


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 400), max_size=6),
    piece=st.integers(1, 90),
)
def test_messages_come_as_they_were_sent(sizes: list[int], piece: int) -> None:
    """Long and short ones in any order, split into pieces of any size."""
    messages = [submit(size, f"r{number}") for number, size in enumerate(sizes)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(message_parts, "PIECE_BYTES", piece)
        patch.setattr(message_parts, "MAX_WHOLE_BYTES", piece + 64)
        sent = [each for message in messages for each in in_parts(message)]
    assert all(len(each) <= piece + 64 for each in sent)
    assert joined(Joiner(pb.RouterMessage, 500), sent) == messages


_MESSAGES = st.one_of(
    st.builds(part, st.binary(max_size=40), st.booleans()),
    st.builds(submit, st.integers(0, 60)),
    st.just(pb.RouterMessage()),
)


@given(sent=st.lists(_MESSAGES, max_size=12), most=st.integers(0, 100))
def test_whatever_comes_no_more_is_kept_than_allowed(sent: list[pb.RouterMessage], most: int) -> None:
    joiner = Joiner(pb.RouterMessage, most)
    for message in sent:
        try:
            whole = joiner.join(message)
        except DecodeError:
            assert joiner._begun is None
            return
        assert len(joiner._begun or b"") <= most
        assert (whole is None) == (joiner._begun is not None)
        assert whole is None or not whole.HasField("part")
