"""What a rank holds, and what goes between ranks."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from itertools import chain, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.kv.host_memory import plan_from_bytes, plan_to_bytes
from baton.engine.kv.host_tier import CopyPlan
from baton.engine.step import StepTensors
from baton.parallel import channel
from baton.parallel.channel import ChannelClosedError, to_leader, to_ranks
from baton.parallel.messages import Connect, RankFailed, Reply, StepLayout
from baton.parallel.shard import Shard, StateSplit, split


@dataclass(frozen=True)
class Sizes:
    num_heads: int
    num_kv_heads: int
    num_layers: int
    intermediate_size: int
    vocab_size: int

    @property
    def inner_sizes(self) -> tuple[int, ...]:
        return (self.intermediate_size,)

    @property
    def state_splits(self) -> tuple[StateSplit, ...]:
        return ()


@st.composite
def sizes(draw: st.DrawFn) -> Sizes:
    kv_heads = draw(st.integers(1, 12))
    return Sizes(
        num_heads=kv_heads * draw(st.integers(1, 12)),
        num_kv_heads=kv_heads,
        num_layers=draw(st.integers(1, 20)),
        intermediate_size=draw(st.integers(1, 300)),
        vocab_size=draw(st.integers(1, 300)),
    )


class TestShard:
    @given(sizes(), st.integers(1, 16), st.integers(1, 8))
    def test_together_they_hold_everything_once(self, model: Sizes, tp: int, pp: int) -> None:
        try:
            shards = [Shard.of(model, rank, tp, pp) for rank in range(tp * pp)]
        except ValueError as error:
            allowed = model.num_heads % tp == 0 and tp <= min(model.intermediate_size, model.vocab_size)
            allowed &= model.num_kv_heads % tp == 0 or tp % model.num_kv_heads == 0
            assert not (allowed and pp <= model.num_layers), str(error)
            return
        assert [shard.rank for shard in shards] == list(range(tp * pp))
        group = shards[:tp]
        assert list(chain(*(shard.heads for shard in group))) == list(range(model.num_heads))
        assert list(chain(*(shard.inner for shard in group))) == list(range(model.intermediate_size))
        assert list(chain(*group[0].vocab_parts)) == list(range(model.vocab_size))
        assert list(chain(*(shard.layers for shard in shards[::tp]))) == list(range(model.num_layers))
        assert all(shard.layers and shard.inner and shard.vocab for shard in shards)
        for shard in shards:
            per_kv = model.num_heads // model.num_kv_heads
            assert {head // per_kv for head in shard.heads} == set(shard.kv_heads)
            # The kernels' rule: of the rank's own heads, the same number reads each of its KV heads.
            own = len(shard.heads) // len(shard.kv_heads)
            for at, head in enumerate(shard.heads):
                assert head // per_kv == shard.kv_heads[at // own]
        assert [s.rank for s in shards if s.is_last_stage] == list(shards[0].last_stage)
        assert [s.rank for s in shards if s.is_first_stage] == list(range(tp))

    @given(st.integers(0, 1000), st.integers(1, 50))
    def test_parts_differ_by_one_at_most(self, size: int, parts: int) -> None:
        lengths = [len(split(size, parts, index)) for index in range(parts)]
        assert sum(lengths) == size
        assert all(0 <= before - after <= 1 for before, after in pairwise(lengths))
        assert max(lengths) - min(lengths) <= 1


class TestChannel:
    def test_messages_and_payloads_in_order(self) -> None:
        ours, theirs = socket.socketpair()
        leader, rank = to_ranks(ours), to_leader(theirs)
        leader.send(Connect(3, "10.0.0.1", 1234))
        leader.send(LAYOUT, torch.arange(30).numpy().data)
        assert rank.receive() == (Connect(3, "10.0.0.1", 1234), bytearray())
        message, payload = rank.receive()
        assert message == LAYOUT
        assert torch.frombuffer(payload, dtype=torch.int64).tolist() == list(range(30))
        rank.send(RankFailed("é"))
        rank.send(Reply(3, 1 << 40))
        assert leader.receive()[0] == RankFailed("é")
        assert leader.receive()[0] == Reply(3, 1 << 40)
        leader.close()
        with pytest.raises(ChannelClosedError, match="closed the connection"):
            rank.receive()
        with pytest.raises(OSError, match="pipe"):
            rank.send(Reply(1))
        rank.close()

    @pytest.mark.parametrize(
        ("frame", "problem"),
        [
            (struct.pack("!IQ", channel.MAX_HEADER + 1, 0), "a frame of"),
            (struct.pack("!IQ", 1, channel.MAX_PAYLOAD + 1), "a frame of"),
            (struct.pack("!IQ", 3, 0) + b"\xc1\xc1\xc1", "a message that is none"),
            (struct.pack("!IQ", 1, 0) + b"\x01", "a message that is none"),
            (struct.pack("!IQ", 9, 0) + b"\x01", "closed the connection"),
        ],
    )
    def test_what_is_no_frame(self, frame: bytes, problem: str) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            theirs.sendall(frame)
        rank = to_leader(ours)
        with pytest.raises(ChannelClosedError, match=problem):
            rank.receive()
        rank.close()

    def test_what_is_too_large_is_not_sent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(channel, "MAX_PAYLOAD", 7)
        ours, theirs = socket.socketpair()
        leader, rank = to_ranks(ours), to_leader(theirs)
        with pytest.raises(ValueError, match="8 bytes"):
            leader.send(Connect(1, "h", 2), bytes(8))
        leader.send(Connect(1, "h", 2))
        assert rank.receive()[0] == Connect(1, "h", 2)
        leader.close()
        rank.close()


LAYOUT = StepLayout(
    num_tokens=5,
    num_decode=2,
    width=2,
    chunks=((3, 7, 1),),
    num_rows=2,
    narrow=False,
    wanted_width=0,
    num_copies=1,
    with_lengths=False,
    prompts=((2, 1),),
)


def test_a_step_is_laid_out_as_it_is_read() -> None:
    step = StepTensors.of(LAYOUT, torch.arange(sum(LAYOUT.sizes)))
    batch = step.batch
    assert step.token_ids.tolist() == [0, 1, 2, 3, 4]
    assert batch.positions.tolist() == [5, 6, 7, 8, 9]
    assert batch.slot_offsets.tolist() == [15, 16, 17, 18, 19]
    assert batch.decode_contexts.tolist() == [20, 21]
    assert batch.decode_tables.tolist() == [[22, 23], [24, 25]]
    [chunk] = batch.chunks
    assert (chunk.start, chunk.length, chunk.context, chunk.table.tolist()) == (2, 3, 7, [26])
    assert step.rows is not None and step.rows.tolist() == [27, 28]
    assert step.copies is not None and [part.tolist() for part in step.copies] == [[29], [30]]
    assert batch.lengths is None


@given(
    st.dictionaries(st.integers(0, 99), st.integers(0, 99)),
    st.dictionaries(st.integers(0, 99), st.integers(0, 99)),
)
def test_a_plan_of_copies_travels_in_order(saves: dict[int, int], restores: dict[int, int]) -> None:
    plan = CopyPlan(saves, restores)
    read = plan_from_bytes(len(saves), plan_to_bytes(plan))
    assert list(read.saves.items()) == list(saves.items())
    assert list(read.restores.items()) == list(restores.items())
