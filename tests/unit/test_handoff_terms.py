"""What two workers agree on for a link, or what stands against one; and what is measured of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from prometheus_client import CollectorRegistry

from baton.handoff import wire
from baton.handoff.messages import Name
from baton.handoff.timeline import Stage, Timeline
from baton.handoff.wiring import Terms, Wiring, agree
from baton.telemetry import handoff as telemetry
from baton.telemetry.handoff import BusyTime, HandoffMetrics, Pair
from baton.transport import checksum as checksums
from baton.transport.base import BlockForm, Connector, DeviceView, GroupPart
from baton.transport.ranks.endpoint import LocalEndpoint
from baton.transport.ranks.endpoints import RankEndpoints
from baton.transport.ranks.shard import KVShard, KVSlice, slices
from baton.transport.staging import Staging
from baton.transport.tcp import TcpConnector
from baton.v1 import handoff_pb2 as pb

COMPATIBILITY = pb.Compatibility(
    protocol=1,
    model="llama",
    revision="a1",
    kv_dtype="float32",
    layout="bhl2td",
    groups=[pb.KVGroupSpec(kind="full", heads=2, layers=3, vectors=2, dim=8)],
    block_size=16,
)


class _NoMemory:
    def part(self, block_size: int, parts: Sequence[GroupPart] | None = None, arrives_as: str = "") -> _Bytes:
        raise AssertionError("no link is made here")


class _Bytes:
    """Four blocks of one byte."""

    def __init__(self, content: bytes) -> None:
        self.content = bytearray(content)

    def form_of(self, blocks: Sequence[int]) -> BlockForm:
        return BlockForm(1, 1)

    def on_device(self, blocks: Sequence[int]) -> list[DeviceView]:
        raise NotImplementedError

    def whole(self) -> memoryview:
        raise NotImplementedError

    def in_place(self, blocks: Sequence[int]) -> list[memoryview]:
        return [memoryview(self.content)[block : block + 1] for block in blocks]

    def gather(self, blocks: Sequence[int], into: memoryview | DeviceView) -> None: ...

    def scatter(self, blocks: Sequence[int], piece: memoryview | DeviceView) -> None: ...


WHOLE = KVShard.of_one(range(2), range(3))
HALVES = (KVShard.of_one(range(1), range(3)), KVShard.of_one(range(1, 2), range(3)))


def wiring(
    *,
    verify: bool = False,
    block_size: int = 16,
    shares: Sequence[KVShard] = (WHOLE,),
    converts: tuple[str, ...] = (),
) -> Wiring:
    compatibility = pb.Compatibility()
    compatibility.CopyFrom(COMPATIBILITY)
    compatibility.block_size = block_size
    connector: Connector = TcpConnector(Staging(), lambda: None)
    return Wiring(
        incarnation="D",
        address="10.0.0.2:9000",
        ends=RankEndpoints([LocalEndpoint({"tcp": connector}, _NoMemory(), share) for share in shares]),
        compatibility=compatibility,
        metrics=HandoffMetrics(CollectorRegistry(), "decode"),
        verify=verify,
        converts=converts,
    )


def opened(
    *, decode: str = "D", verify: bool = False, shares: Sequence[KVShard] = (WHOLE,), **differing: object
) -> pb.LinkOpen:
    connectors = differing.pop("connectors", ["ucx", "tcp"])
    compatibility = pb.Compatibility()
    compatibility.CopyFrom(COMPATIBILITY)
    for field, value in differing.items():
        setattr(compatibility, field, value)
    return pb.LinkOpen(
        prefill_incarnation="P",
        decode_incarnation=decode,
        compatibility=compatibility,
        connectors=connectors,  # type: ignore[arg-type]
        verify=verify,
        ranks=[wire.shard_to_proto(share) for share in shares],
    )


@pytest.mark.parametrize(
    ("ours", "theirs", "wire_size"), [(16, 16, 16), (16, 64, 16), (64, 16, 16), (48, 16, 16)]
)
def test_the_smaller_block_size_counts(ours: int, theirs: int, wire_size: int) -> None:
    terms = agree(wiring(block_size=ours), opened(block_size=theirs))
    assert isinstance(terms, Terms)
    assert (terms.connector, terms.block_size) == ("tcp", wire_size)


@pytest.mark.parametrize(("ours", "theirs"), [(False, True), (True, False), (True, True), (False, False)])
def test_one_side_can_have_checksums_made(ours: bool, theirs: bool) -> None:
    terms = agree(wiring(verify=ours), opened(verify=theirs))
    assert isinstance(terms, Terms)
    assert terms.verify == (ours or theirs)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("model", "qwen", ("qwen", "llama")),
        ("revision", "b2", ("b2", "a1")),
        ("kv_dtype", "bfloat16", ("bfloat16", "float32")),
        ("quantization", "int8", ("int8", "decode none")),
        ("encryption", "TLS 1.3", ("prefill TLS 1.3", "decode none")),
        ("layout", "lb2htd", ("lb2htd", "bhl2td")),
        ("protocol", 9, ("9", "1")),
        ("block_size", 24, ("24", "16", "divide")),
        ("block_size", 0, ("0", "16", "divide")),
        ("connectors", ["smoke"], ("smoke", "tcp")),
    ],
)
def test_what_cannot_work_is_refused_by_name(field: str, value: object, words: tuple[str, ...]) -> None:
    refusal = agree(wiring(), opened(**{field: value}))  # type: ignore[arg-type]
    assert isinstance(refusal, pb.LinkRefuse)
    assert refusal.field == field
    assert all(word in refusal.reason for word in (field.rstrip("s"), *words))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("heads", 4, "prefill 4, decode 2"),
        ("layers", 5, "prefill 5, decode 3"),
        ("dim", 16, "prefill 16, decode 8"),
        ("kind", "window", "prefill window, decode full"),
        ("window", 512, "prefill 512, decode 0"),
    ],
)
def test_groups_that_differ_are_refused_by_name(field: str, value: str | int, words: str) -> None:
    theirs = opened()
    setattr(theirs.compatibility.groups[0], field, value)
    refusal = agree(wiring(), theirs)
    assert isinstance(refusal, pb.LinkRefuse)
    assert refusal.field == f"groups[0].{field}"
    assert refusal.reason == f"groups[0].{field} differs: {words}"


FP8 = "float8_e4m3fn"


def test_kv_of_another_type_is_taken_where_the_option_says_so() -> None:
    terms = agree(wiring(converts=(FP8,), block_size=64), opened(kv_dtype=FP8))
    assert isinstance(terms, Terms)
    assert (terms.arrives_as, terms.block_size) == (FP8, 16)
    alike = agree(wiring(converts=(FP8,)), opened())
    assert isinstance(alike, Terms)
    assert alike.arrives_as == ""


@pytest.mark.parametrize(
    ("differing", "reason"),
    [
        ({"kv_dtype": "bfloat16"}, "kv_dtype differs: prefill bfloat16, decode float32"),
        ({"kv_dtype": FP8, "quantization": "int8"}, "quantization differs: prefill int8, decode none"),
    ],
)
def test_an_option_to_convert_makes_nothing_else_fit(differing: dict[str, str], reason: str) -> None:
    refusal = agree(wiring(converts=(FP8,)), opened(**differing))  # type: ignore[arg-type]
    assert isinstance(refusal, pb.LinkRefuse)
    assert refusal.reason == reason


def test_without_the_option_the_refusal_names_it() -> None:
    refusal = agree(wiring(), opened(kv_dtype=FP8))
    assert isinstance(refusal, pb.LinkRefuse)
    assert refusal.reason == (
        f"kv_dtype differs: prefill {FP8}, decode float32; decode converts it with --kv-convert allow"
    )


def test_bytes_that_are_converted_cannot_be_compared() -> None:
    refusal = agree(wiring(converts=(FP8,)), opened(kv_dtype=FP8, verify=True))
    assert isinstance(refusal, pb.LinkRefuse)
    assert refusal.field == "verify"
    assert refusal.reason == (
        f"verify_handoff compares bytes, which decode changes when it converts {FP8} (--kv-convert) to "
        "float32; allowed: one of both options"
    )


def test_blocks_with_scales_have_one_size() -> None:
    ours = wiring()
    ours.compatibility.kv_dtype = "fp8-dynamic"
    assert isinstance(agree(ours, opened(kv_dtype="fp8-dynamic")), Terms)
    refusal = agree(ours, opened(kv_dtype="fp8-dynamic", block_size=32))
    assert isinstance(refusal, pb.LinkRefuse)
    assert refusal.reason == (
        "block_size must be the same with KV of fp8-dynamic, whose blocks have scales: prefill 32, decode 16"
    )


@pytest.mark.parametrize("theirs", [(WHOLE,), HALVES])
@pytest.mark.parametrize("ours", [(WHOLE,), HALVES, HALVES * 2])
def test_how_many_ranks_there_are_is_no_mismatch(
    ours: tuple[KVShard, ...], theirs: tuple[KVShard, ...]
) -> None:
    terms = agree(wiring(shares=ours), opened(shares=theirs))
    assert isinstance(terms, Terms)
    assert terms.slices == slices(theirs, ours)


@pytest.mark.parametrize(
    ("theirs", "words"),
    [(HALVES[:1], "do not hold"), ((WHOLE, *HALVES), "equal or have nothing in common")],
)
def test_ranks_that_cannot_be_are_refused(theirs: tuple[KVShard, ...], words: str) -> None:
    refusal = agree(wiring(), opened(shares=theirs))
    assert isinstance(refusal, pb.LinkRefuse)
    assert refusal.field == "ranks"
    assert words in refusal.reason


def test_a_worker_that_says_nothing_of_ranks_has_one() -> None:
    terms = agree(wiring(), opened(shares=()))
    assert isinstance(terms, Terms)
    assert terms.slices == (KVSlice(0, 0, WHOLE),)
    refusal = agree(wiring(shares=HALVES), opened(shares=()))
    assert isinstance(refusal, pb.LinkRefuse)
    assert (refusal.field, "decode has 2" in refusal.reason) == ("ranks", True)


def test_decode_tells_prefill_of_each_data_connection() -> None:
    for number, (ours, theirs) in enumerate([((WHOLE,), (WHOLE,)), (HALVES, (WHOLE,)), (HALVES, HALVES)]):
        addresses = [f"10.0.0.2:{rank}" for rank in range(len(ours))]
        channels = wiring(shares=ours).ends.channels(slices(theirs, ours), addresses)
        accept = pb.LinkAccept()
        wire.accept_channels(accept, channels)
        assert wire.channels_of(pb.LinkAccept.FromString(accept.SerializeToString()), WHOLE) == channels
        assert (accept.data_address == "10.0.0.2:0") == (number == 0), "as it was before there were ranks"
    assert len({channel.token for channel in channels}) == 2


def test_another_process_is_not_meant() -> None:
    refusal = agree(wiring(), opened(decode="an earlier one"))
    assert isinstance(refusal, pb.LinkRefuse)
    assert refusal.field == "decode_incarnation"


async def test_a_checksum_covers_the_blocks_in_their_order() -> None:
    memory = _Bytes(b"abcd")
    first = await checksums.checksum(memory, (0, 2, 3))
    assert first == await checksums.checksum(_Bytes(b"acd."), (0, 1, 2))
    assert first != await checksums.checksum(memory, (0, 3, 2))
    memory.content[3] ^= 1
    assert first != await checksums.checksum(memory, (0, 2, 3))


def test_a_timeline_keeps_the_first_of_what_is_repeated_and_the_last_of_what_comes_piecemeal() -> None:
    timeline = Timeline(1.0, "tcp")
    for stage, now in (
        (Stage.GRANTED, 2.0),
        (Stage.GRANTED, 3.0),
        (Stage.ARRIVED, 4.0),
        (Stage.ARRIVED, 5.0),
        (Stage.GRANTED, 6.0),
    ):
        timeline.reach(stage, now)
    assert timeline.between(Stage.GRANTED, Stage.ARRIVED) == 3.0
    assert timeline.between(Stage.ARRIVED, Stage.GRANTED) == 0.0
    assert timeline.between(Stage.ASKED, Stage.COMMITTED) is None
    assert timeline.moved_at == 5.0  # what was said again moves nothing
    assert timeline.last is Stage.ARRIVED
    assert '"arrived": 5.0' in timeline.line(Name("r", 1))


def test_time_in_which_sends_overlap_counts_once() -> None:
    spent = list[float]()
    busy = BusyTime(spent.append)
    busy.start(1.0)
    busy.start(2.0)
    busy.end(3.0)
    busy.end(5.0)
    busy.start(9.0)
    busy.end(9.5)
    assert spent == [4.0, 0.5]


def test_a_peer_that_comes_back_is_a_reconnect_whatever_carries_the_blocks() -> None:
    registry = CollectorRegistry()
    metrics = HandoffMetrics(registry, "prefill")
    for connector in ("ucx", "ucx", "tcp"):
        metrics.linked(Pair("10.0.0.2:9000", connector))

    def value(name: str, connector: str) -> float | None:
        labels = {"role": "prefill", "peer": "10.0.0.2:9000", "connector": connector}
        return registry.get_sample_value(f"baton_handoff_{name}_total", labels)

    assert (value("links_opened", "ucx"), value("reconnects", "ucx")) == (2, 1)
    assert (value("links_opened", "tcp"), value("reconnects", "tcp")) == (1, 1)


def test_the_number_of_series_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "MAX_PEERS", 3)
    registry = CollectorRegistry()
    metrics = HandoffMetrics(registry, "prefill")
    for port in range(10):
        pair = Pair(f"10.0.0.2:{port}", "tcp")
        metrics.linked(pair)
        metrics.sent(pair, 8)
    samples = [
        s for family in registry.collect() for s in family.samples if s.name.endswith("sent_bytes_total")
    ]
    assert {s.labels["peer"] for s in samples} == {f"10.0.0.2:{port}" for port in (7, 8, 9)}
