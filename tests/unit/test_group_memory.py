"""The bytes of wire blocks of several KV groups, whatever pages they lie in on either side."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from baton.transport import registry
from baton.transport.base import BlockForm, ConnectorSettings, GroupPart, PageMemory
from baton.transport.block_names import names_of, state_names
from baton.transport.pool_memory import PoolMemory
from baton.transport.ranks.endpoint import LocalEndpoint, RankAddress
from baton.transport.ranks.endpoints import RankEndpoints
from baton.transport.ranks.shard import KVShard, objection, rank_shard, slices, whole_shard
from baton.transport.staging import Staging
from baton_kernels.kv_fp8 import FP8, KVScales
from baton_kernels.kv_layout import KVGroup, KVLayout, LayerKV, StateKV, TokenKV
from baton_kernels.kv_scaled import scaled_view, scales_of

LENGTH = 64
"""Tokens of the one sequence that moves."""
HERE = RankAddress("127.0.0.1", "127.0.0.1")
SCALES = {layer: KVScales(2.0**layer / 8, 2.0**-layer) for layer in range(8)}
KINDS = ("full and window", "latent", "latent and state", "full, window and state")


def kept_of(kind: str, tp: int) -> list[list[LayerKV]]:
    """What the layers of a model keep on one of ``tp`` ranks."""
    full, window = TokenKV(4 // tp, 2, 8), TokenKV(4 // tp, 2, 8, window=20)
    latent, state = TokenKV(1, 1, 24), StateKV(8 // tp, 50)
    match kind:
        case "full and window":
            return [[full] if layer % 3 == 0 else [window] for layer in range(7)]
        case "latent":
            return [[latent] for _ in range(5)]
        case "latent and state":
            return [[latent] if layer % 4 == 3 else [state] for layer in range(8)]
        case _:
            return [[full, state] if layer % 2 else [window] for layer in range(6)]


@dataclass
class Whole:
    """What a model has computed of one sequence, by group: [heads, layers, vectors, tokens, dim] or, of the
    state, [layers, units, size]."""

    groups: tuple[KVGroup, ...]
    values: list[Tensor]
    dtype: torch.dtype = torch.bfloat16
    """The type of K and V."""

    @staticmethod
    def of(kind: str) -> Whole:
        groups = KVLayout.of(kept_of(kind, 1), 16, 2).groups
        random = torch.Generator().manual_seed(7)
        values = []
        for group in groups:
            kv, layers = group.kv, len(group.layers)
            if isinstance(kv, StateKV):
                values.append(torch.randn(layers, kv.units, kv.size, generator=random))
            else:
                shape = (kv.heads, layers, kv.vectors, LENGTH, kv.dim)
                values.append(torch.randn(shape, generator=random).mul_(200).bfloat16())
        return Whole(groups, values)

    def converted(self, dtype: torch.dtype) -> Whole:
        """Return the same as numbers of this type, from or to FP8 by ``SCALES``."""
        values = []
        for group, value in zip(self.groups, self.values, strict=True):
            if not is_tokens(group):
                values.append(value)
                continue
            pairs = [(SCALES[layer].k, SCALES[layer].v) for layer in group.layers]
            scales = torch.tensor(pairs)[..., None, None]
            if dtype == FP8:
                values.append((value.float() / scales).clamp(-448, 448).to(FP8))
            else:
                values.append((value.float() * scales).to(dtype))
        return Whole(self.groups, values, dtype)


class Rank:
    """One rank's pool, in which the sequence's blocks lie anywhere: in the same pages at all ranks."""

    def __init__(self, whole: Whole, kind: str, block_size: int, tp: int, rank: int, pp: int, stage: int):
        layers = len(kept_of(kind, 1))
        here = range(layers * stage // pp, layers * (stage + 1) // pp)
        self.layout = KVLayout.of(kept_of(kind, tp), block_size, whole.dtype.itemsize, here)
        self.share = rank_shard(whole.groups, self.layout.groups, rank, tp)
        self.num_blocks = -(-LENGTH // block_size)
        count = sum(len(group.tables) for group in self.layout.groups) * self.num_blocks
        order = torch.randperm(2 * count, generator=torch.Generator().manual_seed(block_size + tp))
        free = iter(order.tolist())
        self.pages: list[list[int]] = [
            [next(free) for _ in range(len(group.tables) * (self.num_blocks if is_tokens(group) else 1))]
            for group in self.layout.groups
        ]
        self.pool = torch.zeros(2 * count, self.layout.page_bytes // whole.dtype.itemsize, dtype=whole.dtype)
        self.memory = PoolMemory(self.pool, layout=self.layout, kv_scales=SCALES)

    def names(self, number: int, wire_size: int) -> tuple[int, ...]:
        """Of the whole sequence in one group."""
        group, ratio = self.layout.groups[number], self.layout.block_size // wire_size
        if not is_tokens(group):
            return state_names(number, self.pages[number], ratio)
        return names_of(number, self.pages[number], len(group.tables), ratio)

    def put(self, whole: Whole) -> None:
        for number, value in enumerate(self.expected(whole)):
            self.cells(number, value)

    def get(self) -> list[Tensor]:
        return [self.cells(number) for number in range(len(self.layout.groups))]

    def expected(self, whole: Whole) -> list[Tensor]:
        """What the pool must hold, by what the layout says, and not by how it moves."""
        cut = []
        for value, part, group in zip(whole.values, self.share.groups, whole.groups, strict=True):
            heads = slice(part.heads.start, part.heads.stop)
            layers = slice(part.layers.start, part.layers.stop)
            cut.append(value[heads, layers] if is_tokens(group) else value[layers, heads])
        return cut

    def cells(self, number: int, value: Tensor | None = None) -> Tensor:
        """Read, or write, what models read and write: views of the pool by table."""
        group, pages, layout = self.layout.groups[number], self.pages[number], self.layout
        kv, width = group.kv, len(group.tables)
        if isinstance(kv, StateKV):
            floats = self.pool.view(torch.float32)
            found = torch.zeros(len(group.layers), kv.units, kv.size)
            for layer in range(len(group.layers)):
                for unit in range(kv.units):
                    page, at = divmod(layer * kv.units + unit, group.per_page)
                    cell = floats[pages[page], at * kv.size : (at + 1) * kv.size]
                    if value is not None:
                        cell.copy_(value[layer, unit])
                    found[layer, unit] = cell
            return found
        size = layout.block_size
        found = torch.zeros(
            kv.heads, len(group.layers), kv.vectors, self.num_blocks * size, kv.dim, dtype=self.pool.dtype
        )
        for layer in range(len(group.layers)):
            table, index = divmod(layer, group.per_page)
            view = self.pool.view(layout.view_shape(group.tables.start + table, len(self.pool)))
            for block in range(self.num_blocks):
                place = view[pages[block * width + table], :, index]
                tokens = slice(block * size, (block + 1) * size)
                if value is not None:
                    place.copy_(value[:, layer, :, tokens])
                found[:, layer, :, tokens] = place
        return found


def is_tokens(group: KVGroup) -> bool:
    return isinstance(group.kv, TokenKV)


def worker(whole: Whole, kind: str, block_size: int, tp: int, pp: int) -> list[Rank]:
    return [Rank(whole, kind, block_size, tp, rank, pp, stage) for stage in range(pp) for rank in range(tp)]


def ends(ranks: Sequence[Rank], connector: str) -> RankEndpoints:
    members = []
    for rank in ranks:
        settings = ConnectorSettings(Staging(), lambda: None, "127.0.0.1")
        members.append(LocalEndpoint(registry.available(connector, settings), rank.memory, rank.share))
    return RankEndpoints(members)


PAIRS = [
    pytest.param((16, 1, 1), (16, 1, 1), id="alike"),
    pytest.param((16, 1, 1), (64, 1, 1), id="larger pages"),
    pytest.param((64, 1, 1), (16, 1, 1), id="smaller pages"),
    pytest.param((16, 1, 1), (32, 2, 1), id="tp 1 to 2"),
    pytest.param((32, 2, 1), (16, 1, 1), id="tp 2 to 1"),
    pytest.param((16, 2, 1), (16, 4, 1), id="tp 2 to 4"),
    pytest.param((16, 1, 2), (16, 2, 1), id="pp 2 to tp 2"),
    pytest.param((16, 1, 1), (16, 1, 4), id="pp 1 to 4, stages without a group"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
async def test_every_rank_gets_each_group_whole(
    kind: str, prefill: tuple[int, int, int], decode: tuple[int, int, int]
) -> None:
    await check_move(kind, prefill, decode, "tcp")


@pytest.mark.parametrize("connector", ["ucx", "gloo"])
@pytest.mark.parametrize("decode", [(16, 1, 1), (32, 2, 1)], ids=["alike", "tp 1 to 2"])
async def test_every_connector_moves_groups(connector: str, decode: tuple[int, int, int]) -> None:
    await check_move("full, window and state", (16, 1, 1), decode, connector)


async def test_kv_that_is_converted_arrives_as_the_receiver_would_have_rounded_it() -> None:
    """Between any block sizes and ranks, whose pages have other numbers of layers, and beside states."""
    numbers = Whole.of("full, window and state")
    for whole, dtype in (
        (numbers, FP8),
        (numbers.converted(FP8), torch.bfloat16),
        (numbers.converted(FP8), torch.float32),
    ):
        for prefill, decode in (((16, 1, 1), (64, 1, 1)), ((64, 2, 1), (16, 1, 2)), ((16, 1, 1), (16, 2, 1))):
            await check_move("full, window and state", prefill, decode, "tcp", whole, dtype)


def test_blocks_travel_with_their_scales() -> None:
    """To the second of two ranks, whose pages have other numbers of layers."""
    kind, heads = "full and window", range(2, 4)
    here, there = (KVLayout.of(kept_of(kind, tp), 16, 1, None, 4) for tp in (1, 2))
    pools = [
        torch.randint(0, 256, (64, layout.page_bytes), dtype=torch.uint8).view(FP8)
        for layout in (here, there)
    ]
    parts = [GroupPart(heads, range(len(group.layers))) for group in here.groups]
    given = PoolMemory(pools[0], layout=here).part(16, parts)
    taken = PoolMemory(pools[1], layout=there).part(16)
    for number, (ours, theirs) in enumerate(zip(here.groups, there.groups, strict=True)):
        pages = [[9 + at for at in ours.tables], [30 - at for at in theirs.tables]]
        sent = names_of(number, pages[0], len(ours.tables), 1)
        landing = names_of(number, pages[1], len(theirs.tables), 1)
        piece = memoryview(bytearray(given.form_of(sent).nbytes))
        assert taken.form_of(landing).nbytes == piece.nbytes == len(ours.layers) * 2 * 2 * (16 * 8 + 4)
        given.gather(sent, piece)
        taken.scatter(landing, piece)
        for layer in ours.layers:
            found = []
            for layout, pool, page in zip((here, there), pools, pages, strict=True):
                place = layout.place_of(layer, layout.groups[number].kv)
                view = scaled_view(pool, layout.view_shape(place.table, len(pool)))
                at = page[place.table - layout.groups[number].tables.start], slice(None), place.index
                found.append((view.view(torch.uint8)[at], scales_of(view).view(torch.int32)[at]))
            for source, target in zip(*found, strict=True):
                assert torch.equal(source[heads.start :], target)


def test_blocks_with_scales_are_not_divided_or_converted() -> None:
    layout = KVLayout.of([[TokenKV(2, 2, 8)]], 16, 1, None, 4)
    memory = PoolMemory(torch.zeros(3, layout.page_bytes, dtype=torch.uint8).view(FP8), layout=layout)
    with pytest.raises(ValueError, match="block_size 8: blocks with scales are not divided"):
        memory.part(8)
    with pytest.raises(ValueError, match=r"arrives_as is 'bfloat16'; allowed for a pool of fp8-dynamic: $"):
        memory.part(16, None, "bfloat16")


async def check_move(
    kind: str,
    prefill: tuple[int, int, int],
    decode: tuple[int, int, int],
    connector: str,
    whole: Whole | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """``dtype``: the type to which the receiver converts; None: the sender's."""
    whole = Whole.of(kind) if whole is None else whole
    landing = whole if dtype is None else whole.converted(dtype)
    arrives_as = "" if dtype is None else str(whole.dtype).removeprefix("torch.")
    sources, targets = worker(whole, kind, *prefill), worker(landing, kind, *decode)
    for ranks in (sources, targets):
        assert objection([rank.share for rank in ranks], whole_shard(whole.groups)) is None
    for rank in sources:
        rank.put(whole)
    senders, receivers = ends(sources, connector), ends(targets, connector)
    assert senders.whole == receivers.whole == whole_shard(whole.groups)
    wire_size = min(prefill[0], decode[0])
    addresses = (await receivers.listen([HERE] * len(targets), 0))[connector]
    channels = receivers.channels(slices(senders.shares, receivers.shares), addresses)
    lost: list[str] = []
    receiver = receivers.expect(connector, wire_size, channels, lambda: lost.append("receiver"), arrives_as)
    sender = await senders.connect(connector, wire_size, channels, lambda: lost.append("sender"))
    for number in range(len(whole.groups)):
        sent, landed = sources[0].names(number, wire_size), targets[0].names(number, wire_size)
        assert sender.size_of(sent) == receiver.size_of(landed)
        arrival = receiver.post_receive(number + 1, landed)
        await asyncio.wait_for(asyncio.ensure_future(sender.send(number + 1, sent)), 30)
        await asyncio.wait_for(asyncio.ensure_future(arrival), 30)
        if not arrives_as:
            sums = await asyncio.gather(sender.checksum(sent), receiver.checksum(landed))
            assert sums[0] == sums[1]
    for rank in targets:
        others = [
            page for page in range(len(rank.pool)) if page not in {p for own in rank.pages for p in own}
        ]
        assert not rank.pool.view(torch.uint8)[others].any(), "no page but the sequence's is touched"
        for got, expected in zip(rank.get(), rank.expected(landing), strict=True):
            assert torch.equal(got.float().flatten(), expected.float().flatten())
    assert lost == []
    await asyncio.gather(sender.close(), receiver.close())
    await asyncio.gather(senders.close(), receivers.close())


def test_a_latent_block_between_equal_pages_is_not_copied() -> None:
    layout = KVLayout.of([[TokenKV(1, 1, 24)]] * 3, 16, 2)
    pool = torch.zeros(8, layout.page_bytes // 2, dtype=torch.bfloat16)
    part = PoolMemory(pool, layout=layout).part(16)
    assert [view.nbytes for view in part.in_place([2, 3, 4, 7])] == [
        3 * layout.page_bytes,
        layout.page_bytes,
    ]


@pytest.mark.parametrize("unit", [48, 50])
def test_a_state_goes_in_one_view_for_each_of_its_pages(unit: int) -> None:
    layout = KVLayout.of([[StateKV(4, unit)] if layer else [TokenKV(1, 1, 24)] for layer in range(6)], 16, 2)
    state = layout.groups[-1]
    pool = torch.zeros(16, layout.page_bytes // 2, dtype=torch.bfloat16)
    part = PoolMemory(pool, layout=layout).part(16)
    names = state_names(1, range(1, 1 + 2 * len(state.tables), 2), 1)
    assert part.form_of(names) == BlockForm(len(state.tables), 5 * 4 * unit * 4)
    assert len(part.in_place(names)) == len(state.tables)


def test_names_of_two_groups_make_no_message() -> None:
    layout = KVLayout.of(kept_of("full and window", 1), 16, 2)
    pool = torch.zeros(4, layout.page_bytes // 2, dtype=torch.bfloat16)
    part: PageMemory = PoolMemory(pool, layout=layout).part(16)
    window = layout.groups[1]
    whole = names_of(1, range(len(window.tables)), len(window.tables), 1)
    part.form_of(whole)
    for wrong in ([0, *whole], [*whole, 2 << 40], whole[:-1] if len(whole) > 1 else [], [2 << 40]):
        with pytest.raises(ValueError, match="all of one of 2 groups"):
            part.form_of(wrong)


def test_a_part_for_each_group_is_needed() -> None:
    layout = KVLayout.of(kept_of("full and window", 1), 16, 2)
    memory = PoolMemory(torch.zeros(4, layout.page_bytes // 2, dtype=torch.bfloat16), layout=layout)
    with pytest.raises(ValueError, match="parts of 1 groups: the pool has 2"):
        memory.part(16, [GroupPart(range(4), range(3))])


class TestLatentKvIsOnEveryRank:
    """A latent group, of which all ranks have the same, beside a state whose units they share out."""

    @staticmethod
    def shares(tp: int) -> list[KVShard]:
        units = 8 // tp
        return [
            KVShard((GroupPart(range(1), range(3)), GroupPart(range(r * units, (r + 1) * units), range(5))))
            for r in range(tp)
        ]

    def test_it_comes_from_one(self) -> None:
        for prefill, decode in ((2, 1), (1, 2), (2, 2), (4, 2), (2, 4)):
            made = slices(self.shares(prefill), self.shares(decode))
            latent = [(s.prefill, s.decode) for s in made if s.share.groups[0].size]
            assert sorted(to for _, to in latent) == list(range(decode)), "each rank gets it once"
            units = [(s.decode, u) for s in made for u in s.share.groups[1].heads]
            assert sorted(units) == sorted({(u * decode // 8, u) for u in range(8)})

    def test_it_needs_no_connection_of_its_own(self) -> None:
        for tp in (2, 4):
            made = slices(self.shares(tp), self.shares(tp))
            assert [(s.prefill, s.decode) for s in made] == [(rank, rank) for rank in range(tp)]

    def test_shares_of_one_group_alone_are_no_shares(self) -> None:
        whole = self.shares(1)[0]
        assert objection(self.shares(2), whole) is None
        assert objection([KVShard(whole.groups[:1])], whole) == "a rank holds parts of 1 groups, of 2"
        lacking = KVShard((whole.groups[0], GroupPart(range(4), range(5))))
        reason = "the ranks together do not hold heads 0 to 7 of layers 0 to 4 of group 1"
        assert objection([lacking], whole) == reason
