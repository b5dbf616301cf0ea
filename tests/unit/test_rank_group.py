"""Links between workers of several ranks: each byte in its place, once, whatever the ranks on either side.
And what becomes of the whole when a part is cancelled or lost."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from baton.transport.base import TransferError
from baton.transport.pool_memory import PoolMemory
from baton.transport.ranks.endpoint import DataLink, LocalEndpoint, RankAddress, RankEndpoint
from baton.transport.ranks.endpoints import DataChannel, RankEndpoints
from baton.transport.ranks.remote import EndpointMissingError, RemoteEndpoint
from baton.transport.ranks.shard import MAX_RANKS, KVShard, KVSlice, objection, slices
from baton.transport.staging import Staging
from baton.transport.tcp import TcpConnector
from tests.support.deep import all_deep_but
from tests.support.links import WAIT_S, until, within
from tests.support.nixl import loads_nixl
from tests.support.rank_process import RankProcesses, mapped, rank_processes
from tests.support.ranks import Linked, Side, cut, in_place, link, random_kv, shares, side, tokens

LAYERS, BLOCKS = 4, 24
KINDS = (
    "tcp",
    pytest.param(
        "ucx",
        marks=pytest.mark.skipif(
            importlib.util.find_spec("ucxx") is None,
            reason="NOT TESTED: ucxx is not installed (pip install 'baton[ucx]')",
        ),
    ),
    pytest.param("nixl", marks=loads_nixl),
    "gloo",
)


@dataclass(frozen=True)
class Pairing:
    """Ranks of either side, and how many KV heads there are."""

    prefill: int
    decode: int
    heads: int = 4
    prefill_stages: int = 1
    decode_stages: int = 1
    prefill_block: int = 8
    decode_block: int = 8

    def __str__(self) -> str:
        return (
            f"tp{self.prefill}pp{self.prefill_stages}b{self.prefill_block}-"
            f"tp{self.decode}pp{self.decode_stages}b{self.decode_block}-{self.heads}heads"
        )


TP = [
    Pairing(1, 2),
    Pairing(2, 1),
    Pairing(2, 2),
    Pairing(2, 4),
    Pairing(4, 2),
    Pairing(2, 4, heads=2),
    Pairing(4, 1, heads=2),
    Pairing(4, 4, heads=2),
    Pairing(1, 2, heads=1),
]
OTHERS = [
    Pairing(1, 1),
    Pairing(4, 2, prefill_block=16),
    Pairing(1, 2, decode_block=16),
    Pairing(1, 1, prefill_stages=2),
    Pairing(2, 1, decode_stages=2),
    Pairing(2, 2, prefill_stages=2, decode_stages=4),
    Pairing(2, 1, heads=2, prefill_stages=2, decode_block=16),
]


@pytest.fixture(params=all_deep_but(2, KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def starter() -> Iterator[RankProcesses]:
    with rank_processes() as processes:
        yield processes


@pytest.fixture(params=["here", "processes"])
def place(
    request: pytest.FixtureRequest, starter: RankProcesses, tmp_path: Path
) -> tuple[RankProcesses, Path] | None:
    """Where the ranks but the first of either side live."""
    return (starter, tmp_path) if request.param == "processes" else None


@dataclass
class Both:
    """Two workers and their link. The source is ``kv``; the target is empty."""

    prefill: Side
    decode: Side
    link: Linked
    kv: Tensor
    wire: int

    def expected(self, moved: dict[int, int]) -> list[Tensor]:
        """What decode's pools hold once these wire blocks (source → target) were moved, by a plain copy."""
        whole = torch.zeros(BLOCKS * 16 // self._decode_block, *self.kv.shape[1:4], self._decode_block, 4)
        whole = whole.bfloat16()
        view, source = whole_tokens(whole), tokens(self.kv)
        for here, there in moved.items():
            from_, to = (slice(b * self.wire, (b + 1) * self.wire) for b in (here, there))
            view[..., to, :] = source[..., from_, :]
        blocks = view.unflatten(3, (-1, self._decode_block))  # type: ignore[no-untyped-call]
        back = blocks.permute(3, 0, 1, 2, 4, 5)
        return [cut(back, share).contiguous() for share in self.decode.ranks.shares]

    @property
    def _decode_block(self) -> int:
        return self.decode.pools[0].shape[4]

    def check(self, moved: dict[int, int]) -> None:
        for number, (pool, wanted) in enumerate(zip(self.decode.pools, self.expected(moved), strict=True)):
            assert torch.equal(pool, wanted), f"decode's rank {number}"

    async def move(self, messages: list[tuple[list[int], list[int]]], first_tag: int = 1) -> None:
        """(source, target) blocks of each message, all at once."""
        receiver, sender = self.link.receiver, self.link.sender
        posted = [
            receiver.post_receive(tag, target) for tag, (_, target) in enumerate(messages, start=first_tag)
        ]
        await in_place(receiver)
        sent = [sender.send(tag, source) for tag, (source, _) in enumerate(messages, start=first_tag)]
        await within(asyncio.gather(*posted, *sent))  # type: ignore[arg-type]

    async def close(self) -> None:
        await self.link.close()
        await self.prefill.close()
        await self.decode.close()


def whole_tokens(kv: Tensor) -> Tensor:
    return tokens(kv).clone()


async def both(kind: str, pairing: Pairing, place: tuple[RankProcesses, Path] | None = None) -> Both:
    kv = random_kv(BLOCKS * 16 // pairing.prefill_block, pairing.heads, LAYERS, pairing.prefill_block)
    room = (BLOCKS * 16 // pairing.decode_block, pairing.heads, LAYERS, 2, pairing.decode_block, 4)
    held = (
        shares(pairing.prefill, pairing.heads, LAYERS, pairing.prefill_stages),
        shares(pairing.decode, pairing.heads, LAYERS, pairing.decode_stages),
    )
    prefill = await side(kind, kv, held[0], listens=False, processes=place)
    decode = await side(kind, torch.zeros(room).bfloat16(), held[1], listens=True, processes=place)
    wire = min(pairing.prefill_block, pairing.decode_block)
    return Both(prefill, decode, await link(kind, prefill, decode, wire), kv, wire)


class TestWhoSendsWhat:
    @given(
        st.sampled_from([1, 2, 4, 8]),
        st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(1, 4)),
        st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(1, 4)),
    )
    def test_every_rank_gets_what_it_holds_exactly_once(
        self, heads: int, prefill: tuple[int, int], decode: tuple[int, int]
    ) -> None:
        sources, targets = (shares(tp, heads, LAYERS, pp) for tp, pp in (prefill, decode))
        for held in (sources, targets):
            assert objection(held, KVShard.of_one(range(heads), range(LAYERS))) is None
        gets: dict[int, Counter[tuple[int, int]]] = {number: Counter() for number in range(len(targets))}
        for slice_ in slices(sources, targets):
            assert slice_.share.within(sources[slice_.prefill])
            [part] = slice_.share.groups
            gets[slice_.decode].update((h, layer) for h in part.heads for layer in part.layers)
        for number, share in enumerate(targets):
            [part] = share.groups
            assert gets[number] == Counter((h, layer) for h in part.heads for layer in part.layers)

    def test_replicas_take_turns(self) -> None:
        one = KVShard.of_one(range(1), range(LAYERS))
        assert [slice_.prefill for slice_ in slices([one] * 4, [one] * 4)] == [0, 1, 2, 3]
        assert [slice_.prefill for slice_ in slices([one] * 2, [one] * 4)] == [0, 1, 0, 1]

    def test_one_rank_each_is_one_connection_with_everything(self) -> None:
        [slice_] = slices(shares(1, 4, LAYERS), shares(1, 4, LAYERS))
        assert slice_.share == KVShard.of_one(range(4), range(LAYERS))

    @pytest.mark.parametrize(
        ("held", "words"),
        [
            ([], "0 ranks: 1 to 256 are allowed"),
            ([KVShard.of_one(range(4), range(4))] * (MAX_RANKS + 1), "257 ranks"),
            ([KVShard.of_one(range(2), range(4))], "together do not hold"),
            (
                [KVShard.of_one(range(3), range(4)), KVShard.of_one(range(2, 4), range(4))],
                "equal or have nothing in common",
            ),
            (
                [KVShard.of_one(range(4), range(4)), KVShard.of_one(range(2), range(4))],
                "equal or have nothing in common",
            ),
            ([KVShard.of_one(range(5), range(4))], "a rank holds heads 0 to 4 of layers 0 to 3"),
            ([KVShard.of_one(range(4), range(1, 5))], "a rank holds"),
            ([KVShard.of_one(range(4), range(0))], "a rank holds"),
            ([KVShard.of_one(range(3, -1, -1), range(4))], "a rank holds"),
        ],
    )
    def test_shares_that_cannot_be(self, held: list[KVShard], words: str) -> None:
        reason = objection(held, KVShard.of_one(range(4), range(4)))
        assert reason is not None
        assert words in reason


class TestBytes:
    MESSAGES: ClassVar = [([0, 1, 2], [5, 6, 7]), ([9], [0]), ([4, 12, 13, 3], [11, 1, 9, 10])]
    MOVED: ClassVar = {
        here: there for sent, landed in MESSAGES for here, there in zip(sent, landed, strict=True)
    }

    @pytest.mark.parametrize("pairing", all_deep_but(4, TP), ids=str)
    async def test_each_byte_is_in_its_place_and_nothing_else_is(self, kind: str, pairing: Pairing) -> None:
        await self.check(await both(kind, pairing))

    @pytest.mark.parametrize("pairing", OTHERS, ids=str)
    async def test_block_sizes_and_layers_may_differ_too(self, pairing: Pairing) -> None:
        await self.check(await both("tcp", pairing))

    @pytest.mark.parametrize("pairing", all_deep_but(1, [TP[0], TP[4], TP[5], OTHERS[4]]), ids=str)
    async def test_from_process_to_process(
        self, kind: str, pairing: Pairing, starter: RankProcesses, tmp_path: Path
    ) -> None:
        await self.check(await both(kind, pairing, (starter, tmp_path)))

    async def check(self, both: Both) -> None:
        await both.move(self.MESSAGES)
        both.check(self.MOVED)
        for sent, landed in self.MESSAGES:
            ends = both.link.sender.checksum(sent), both.link.receiver.checksum(landed)
            assert len(set(await asyncio.gather(*ends))) == 1
        [sent, landed] = self.MESSAGES[0]
        assert await both.link.receiver.checksum(landed) != await both.link.receiver.checksum(landed[::-1])
        assert both.link.receiver.size_of(landed) == both.link.sender.size_of(sent) > 0
        assert both.link.lost == []
        await both.close()
        assert both.link.lost == []


SENT, LANDED = list(range(8)), list(range(16, 24))


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


async def over(*transfers: Awaitable[None]) -> list[bool]:
    """Which of them went well."""
    async with asyncio.timeout(WAIT_S):
        return [outcome is None for outcome in await asyncio.gather(*transfers, return_exceptions=True)]


class TestCancel:
    """In every phase. What a rank of another process does about it is known when the receive is over."""

    async def test_before_anything_was_sent(
        self, kind: str, place: tuple[RankProcesses, Path] | None
    ) -> None:
        pair = await both(kind, Pairing(2, 2), place)
        receiver, sender = pair.link.receiver, pair.link.sender
        cancelled = receiver.post_receive(1, LANDED)
        await in_place(receiver)
        assert receiver.cancel_receive(1) == (place is None)
        assert await over(cancelled) == [False]
        assert not receiver.cancel_receive(1)
        # Prefill had not heard of it.
        late = sender.send(1, SENT)
        await pair.move([([9], [3])], first_tag=2)
        assert await over(late) == [True]
        pair.check({9: 3})
        assert pair.link.lost == []
        await pair.close()

    async def test_when_only_some_of_the_parts_are_matched(self, kind: str) -> None:
        pair = await both(kind, Pairing(2, 2))
        receiver = pair.link.receiver
        # Rank 0 of prefill is quicker than rank 1: what lies below the bundle, by itself.
        first, second = pair.link.sender._parts  # type: ignore[attr-defined]
        posted = receiver.post_receive(1, LANDED)
        await within(first.send(1, SENT))
        await until(lambda: bool(pair.decode.pools[0][LANDED[-1]].any()))
        assert not receiver.cancel_receive(1)
        assert await over(posted) == [False]
        assert pair.link.lost == [], "a cancel is no loss"
        assert not pair.decode.pools[1].any()
        await within(second.send(1, SENT))
        await pair.move([([9], [3])], first_tag=2)
        assert not pair.decode.pools[1][LANDED].any()
        await pair.close()

    async def test_when_all_has_arrived(self, kind: str, place: tuple[RankProcesses, Path] | None) -> None:
        pair = await both(kind, Pairing(2, 4), place)
        await pair.move([(SENT, LANDED)])
        assert not pair.link.receiver.cancel_receive(1)
        pair.check(dict(zip(SENT, LANDED, strict=True)))
        await pair.move([([9], [3])], first_tag=2)
        await pair.close()


class TestLoss:
    async def test_one_lost_part_is_the_loss_of_all(self, kind: str) -> None:
        pair = await both(kind, Pairing(2, 2))
        posted = pair.link.receiver.post_receive(1, LANDED)
        first, second = pair.link.sender._parts  # type: ignore[attr-defined]
        await within(first.send(1, SENT))
        await second.close()
        assert await over(posted) == [False]
        await until(lambda: sorted(pair.link.lost) == ["receiver", "sender"])
        for refused in (pair.link.sender.send(2, SENT), pair.link.receiver.post_receive(2, LANDED)):
            assert await over(refused) == [False]
        await pair.close()
        assert sorted(pair.link.lost) == ["receiver", "sender"]

    @pytest.mark.parametrize("victim", ["prefill", "decode"])
    async def test_a_rank_that_is_killed_in_the_middle(
        self, kind: str, victim: str, starter: RankProcesses, tmp_path: Path
    ) -> None:
        """It is stopped first, so that its part is under way while those of the others are over."""
        pair = await both(kind, Pairing(2, 2), (starter, tmp_path))
        [pid] = getattr(pair, victim).pids
        posted = pair.link.receiver.post_receive(1, LANDED)
        await in_place(pair.link.receiver)
        stop(pid)
        sent = pair.link.sender.send(1, SENT)
        await until(lambda: bool(pair.decode.pools[0][LANDED[-1]].any()))
        await asyncio.sleep(0.05)
        assert not posted.done()  # type: ignore[attr-defined]
        kill(pid)
        posted_well, sent_well = await over(posted, sent)
        assert not posted_well
        assert not sent_well or victim == "decode"  # to a socket's buffer, it may go well
        await until(lambda: sorted(pair.link.lost) == ["receiver", "sender"])
        async with asyncio.timeout(WAIT_S):
            await pair.link.close()
        before = [pool.clone() for pool in pair.decode.pools]
        await asyncio.sleep(0.1)
        assert all(torch.equal(*both) for both in zip(before, pair.decode.pools, strict=True))
        await pair.close()

    async def test_a_rank_that_does_not_answer_proves_nothing(
        self, kind: str, starter: RankProcesses, tmp_path: Path
    ) -> None:
        """So the fence is not over, and the worker retires."""
        pair = await both(kind, Pairing(1, 2), (starter, tmp_path))
        [pid] = pair.decode.pids
        posted = pair.link.receiver.post_receive(1, LANDED)
        await in_place(pair.link.receiver)
        stop(pid)
        second = pair.link.receiver.post_receive(2, LANDED)
        waiting = pair.link.receiver.in_place()
        assert waiting is not None
        closing = asyncio.ensure_future(pair.link.receiver.close())
        await asyncio.wait([closing], timeout=0.3)
        assert not closing.done()
        assert not waiting.done(), "decode may not tell prefill of it"  # type: ignore[attr-defined]
        assert not posted.done()  # type: ignore[attr-defined]
        os.kill(pid, signal.SIGCONT)
        await within(closing)
        await within(waiting)
        assert await over(posted, second) == [False, False]
        assert "receiver" not in pair.link.lost
        await pair.close()

    async def test_a_link_that_is_closed_while_its_ranks_close(
        self, starter: RankProcesses, tmp_path: Path
    ) -> None:
        pair = await both("tcp", Pairing(1, 2), (starter, tmp_path))
        closing = asyncio.create_task(pair.decode.close())
        for _ in range(3):  # its ranks have been told
            await asyncio.sleep(0)
        async with asyncio.timeout(WAIT_S):
            await pair.link.close()
        await closing
        await pair.prefill.close()

    async def test_a_worker_that_ends_leaves_no_process_of_a_rank(
        self, starter: RankProcesses, tmp_path: Path
    ) -> None:
        pair = await both("tcp", Pairing(1, 2), (starter, tmp_path))
        [pid] = pair.decode.pids
        await pair.decode.close()
        await until(lambda: not Path(f"/proc/{pid}").exists())
        await until(lambda: sorted(pair.link.lost) == ["receiver", "sender"])
        async with asyncio.timeout(WAIT_S):
            await pair.link.close()
        await pair.prefill.close()


class FakeConnector(TcpConnector):
    """Listens nowhere."""

    async def listen(self, host: str, port: int) -> str:
        return f"{host}:{port or 4711}"


def in_turns(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second rank connects when the first has."""
    first_is_made = asyncio.Event()

    def spied(connect: Callable[..., Awaitable[DataLink]]) -> Callable[..., Awaitable[DataLink]]:
        async def connect_in_turn(end: RankEndpoint, *args: object) -> DataLink:
            if end is side.members[1]:
                await first_is_made.wait()
            made = await connect(end, *args)
            if end is side.members[0]:
                first_is_made.set()
            return made

        return connect_in_turn

    for kind in {type(member) for member in side.members}:
        monkeypatch.setattr(kind, "connect", spied(kind.connect))


class TestConnecting:
    async def test_each_rank_has_the_ports_behind_those_of_the_one_before(self) -> None:
        connectors = {name: FakeConnector(Staging(), lambda: None) for name in ("ucx", "tcp")}
        pool = PoolMemory(torch.zeros(1, 1, 1, 2, 8, 4))
        fewer = {"tcp": connectors["tcp"]}
        held = [(connectors, 0), (fewer, 1), (connectors, 2)]
        ends = RankEndpoints(
            [LocalEndpoint(has, pool, KVShard.of_one(range(at, at + 1), range(1))) for has, at in held]
        )
        assert ends.connectors == ("tcp",), "what one lacks, none can use"
        assert ends.whole == KVShard.of_one(range(3), range(1))
        places = [RankAddress("a", "a"), RankAddress("a", "name"), RankAddress("b", "other")]
        assert await ends.listen(places, 7000) == {"tcp": ("a:7001", "name:7002", "other:7004")}
        assert await ends.listen(places, 0) == {"tcp": ("a:4711", "name:4711", "other:4711")}
        with pytest.raises(OSError, match="no ports 65535 to 65536"):
            await ends.listen(places, 65532)

    async def test_one_rank_that_cannot_be_reached_leaves_nothing_open(
        self, kind: str, place: tuple[RankProcesses, Path] | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        held = shares(2, 4, LAYERS)
        kv = random_kv(BLOCKS, 4, LAYERS, 8)
        prefill = await side(kind, kv, held, listens=False, processes=place)
        in_turns(prefill, monkeypatch)
        decode = await side(kind, kv, held, listens=True, processes=place)
        lost: list[str] = []
        made = decode.ranks.channels(slices(held, held), decode.addresses)
        receiver = decode.ranks.expect(kind, 8, made, lambda: lost.append("receiver"))
        await in_place(receiver)
        with socket.create_server(("127.0.0.1", 0)) as unused:
            nobody = f"127.0.0.1:{unused.getsockname()[1]}"
        wrong = [made[0], replace(made[1], address=nobody)]
        with pytest.raises((OSError, TransferError)):
            await prefill.ranks.connect(kind, 8, wrong, lambda: lost.append("sender"))
        await until(lambda: lost == ["receiver"])  # of rank 0's, which was made and closed again
        await within(receiver.close())
        await prefill.close()
        await decode.close()

    async def test_channels_that_this_worker_cannot_have(self) -> None:
        held = shares(2, 4, LAYERS)
        prefill = await side("tcp", random_kv(BLOCKS, 4, LAYERS, 8), held, listens=False)
        wrong = {
            "which has 2": KVSlice(2, 0, held[0]),
            "this rank holds": KVSlice(1, 0, held[0]),
            "does not divide": KVSlice(0, 0, held[0]),
        }
        for words, slice_ in wrong.items():
            channels = [DataChannel(slice_, "127.0.0.1:1", bytes(32))]
            with pytest.raises(ValueError, match=words):
                await prefill.ranks.connect("tcp", 3 if "divide" in words else 8, channels, lambda: None)
        await prefill.close()

    async def test_a_rank_without_the_connector_says_why(
        self, starter: RankProcesses, tmp_path: Path
    ) -> None:
        ours, theirs = socket.socketpair()
        mapped(tmp_path / "pool", (1, 1, 1, 2, 8, 4))
        share = KVShard.of_one(range(1), range(1))
        starter.start(theirs, tmp_path / "pool", (1, 1, 1, 2, 8, 4), share)
        with pytest.raises(EndpointMissingError, match="UCX does not start"):
            await RemoteEndpoint.meet(ours, connector="ucx", host="nowhere", on_crash=lambda: None)
