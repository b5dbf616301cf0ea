"""Workers from EndpointSlices: what slices mean, and what a failing API server may not do to the set."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from baton.router.discovery.endpoint import Endpoint
from baton.router.discovery.inventory import Inventory
from baton.router.discovery.kubernetes import KubernetesDiscovery
from baton.router.discovery.pace import WatchTimings
from baton.router.discovery.slices import EndpointSlice, endpoints_of
from baton.router.discovery.static import StaticDiscovery
from baton.telemetry.discovery import DiscoveryCounts
from tests.support.deep import all_deep_but
from tests.support.fake_kubernetes import PORT_NAME, FakeKubernetes, Slice, pod, serving
from tests.support.local_worker import until

FACTOR = 4.0


def decoded(
    endpoints: list[Slice] | None, name: str = "a", version: int = 1, **fields: object
) -> EndpointSlice:
    document = {
        "metadata": {"name": name, "namespace": "n", "resourceVersion": str(version), "labels": {}},
        "addressType": "IPv4",
        "endpoints": endpoints,
        "ports": [{"name": PORT_NAME, "port": 9000}],
        **fields,
    }
    return msgspec.json.decode(json.dumps(document), type=EndpointSlice)


def found(*slices: EndpointSlice) -> list[Endpoint]:
    return endpoints_of(slices, PORT_NAME)


# --- what slices mean


def test_conditions_that_are_not_given_mean_ready() -> None:
    [one] = found(decoded([{"addresses": ["10.0.0.1"]}]))
    assert one.admits and one.serving
    [one] = found(decoded([{"addresses": ["10.0.0.1"], "conditions": {"ready": None, "terminating": None}}]))
    assert one.admits and one.serving


@pytest.mark.parametrize(
    ("conditions", "admits"),
    [
        ({"ready": False}, False),
        ({"ready": True, "terminating": True, "serving": True}, False),
        ({"ready": True, "terminating": False}, True),
    ],
)
def test_what_is_not_ready_or_is_being_ended_is_given_nothing(
    conditions: dict[str, bool], admits: bool
) -> None:
    [one] = found(decoded([pod("10.0.0.1", "", **conditions)]))
    assert one.admits is admits


def test_ports_go_by_name_and_an_ipv6_host_is_in_brackets() -> None:
    ports = [{"name": "metrics", "port": 1}, {"name": PORT_NAME, "port": 9000}]
    [one] = found(decoded([pod("fd00::7", "u")], addressType="IPv6", ports=ports))
    assert one.address == "[fd00::7]:9000"
    assert found(decoded([pod("10.0.0.1")], ports=[{"name": "other", "port": 1}])) == []
    assert found(decoded([pod("10.0.0.1")], ports=None)) == []


def test_a_pod_of_both_families_is_one_worker() -> None:
    six = decoded([pod("fd00::7", "u")], "six", addressType="IPv6")
    four = decoded([pod("10.0.0.7", "u")], "four")
    assert [one.address for one in found(six, four)] == ["10.0.0.7:9000"]
    # Each family's slice is written on its own: the first to tell of the end is believed.
    ending = decoded([pod("fd00::7", "u", terminating=True)], "six", addressType="IPv6")
    for slices in ((ending, four), (four, ending)):
        [one] = found(*slices)
        assert one.address == "10.0.0.7:9000" and not one.admits


def test_one_word_against_an_endpoint_in_two_slices_is_enough() -> None:
    old, new = pod("10.0.0.1", "u"), pod("10.0.0.1", "u", terminating=True)
    for slices in ((decoded([old], "a"), decoded([new], "b")), (decoded([new], "a"), decoded([old], "b"))):
        [one] = found(*slices)
        assert not one.admits


def test_an_address_given_to_another_pod_is_the_new_pods() -> None:
    old, new = pod("10.0.0.1", "old", terminating=True), pod("10.0.0.1", "new")
    for names in (("a", "b"), ("b", "a")):
        [one] = found(decoded([old], names[0]), decoded([new], names[1]))
        assert one.uid == "new" and one.admits


def test_null_lists_and_pods_without_an_address_are_nobody() -> None:
    assert found(decoded(None), decoded([{"addresses": []}], "b")) == []


def test_late_and_repeated_events_change_nothing() -> None:
    inventory = Inventory(PORT_NAME)
    inventory.replace([decoded([pod("10.0.0.1")], version=5)])
    inventory.apply("MODIFIED", decoded([pod("10.0.0.2")], version=9))
    inventory.apply("MODIFIED", decoded([pod("10.0.0.1")], version=7))
    assert [one.address for one in inventory.endpoints()] == ["10.0.0.2:9000"]
    inventory.apply("DELETED", decoded([], version=11))
    inventory.apply("ADDED", decoded([pod("10.0.0.1")], version=9))
    assert inventory.endpoints() == []
    inventory.apply("ADDED", decoded([pod("10.0.0.3")], version=12))
    assert [one.address for one in inventory.endpoints()] == ["10.0.0.3:9000"]


def test_a_list_from_a_restored_store_counts_though_its_versions_are_lower() -> None:
    inventory = Inventory(PORT_NAME)
    inventory.replace([decoded([pod("10.0.0.1")], version=900)])
    inventory.replace([decoded([pod("10.0.0.2")], version=5)])
    inventory.apply("MODIFIED", decoded([pod("10.0.0.3")], version=6))
    assert [one.address for one in inventory.endpoints()] == ["10.0.0.3:9000"]


# --- the conversation


class Told:
    """What a discovery has told."""

    def __init__(self, discovery: KubernetesDiscovery) -> None:
        self.discovery = discovery
        self.now: list[str] = []
        self.times = 0

    def __call__(self, endpoints: Sequence[Endpoint]) -> None:
        self.now = [each.address.partition(":")[0] for each in endpoints if each.admits]
        self.times += 1


@asynccontextmanager
async def discovering(server: FakeKubernetes) -> AsyncIterator[Told]:
    async with serving(server):
        counts = DiscoveryCounts(CollectorRegistry())
        discovery = KubernetesDiscovery(server.api(), PORT_NAME, counts, WatchTimings().faster(server.factor))
        told = Told(discovery)
        task = asyncio.create_task(discovery.run(told))
        try:
            yield told
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def becomes(told: Told, expected: list[str], seconds: float = 5 / FACTOR) -> None:
    """Within 5 s of the server's clock."""
    await until(lambda: told.now == expected, seconds)


async def test_it_follows_changes_without_a_list() -> None:
    server = FakeKubernetes(FACTOR)
    async with discovering(server) as told:
        await until(lambda: server.watches)
        for number in range(1, 4):
            server.put("a", [pod(f"10.0.0.{number}")])
            await becomes(told, [f"10.0.0.{number}"])
        server.put("b", [pod("10.0.0.9")], role="prefill")
        await becomes(told, ["10.0.0.3", "10.0.0.9"])
        server.delete("a")
        await becomes(told, ["10.0.0.9"])


@pytest.mark.parametrize("fault", ["lost", "stalled", "dropped", "compacted"])
async def test_a_deletion_that_no_event_tells_is_found(fault: str) -> None:
    server = FakeKubernetes(FACTOR)
    server.put("a", [pod("10.0.0.1"), pod("10.0.0.2")])
    async with discovering(server) as told:
        await becomes(told, ["10.0.0.1", "10.0.0.2"])
        await until(lambda: server.watches)
        {"lost": lambda: None, "stalled": server.stall, "dropped": server.drop, "compacted": server.compact}[
            fault
        ]()
        server.losing = 1
        server.put("a", [pod("10.0.0.2")])
        await becomes(told, ["10.0.0.2"])


@pytest.mark.parametrize("fault", ["500", "504", "410", "429", "stall", "drop", "malformed"])
async def test_lists_that_fail_are_tried_again_and_the_last_set_stays(fault: str) -> None:
    server = FakeKubernetes(FACTOR)
    server.put("a", [pod("10.0.0.1")])
    async with discovering(server) as told:
        await becomes(told, ["10.0.0.1"])
        server.list_faults += [fault, fault]  # type: ignore[list-item]
        server.losing = 1
        server.put("a", [pod("10.0.0.2")])
        await becomes(told, ["10.0.0.2"])
        assert told.times == 2, "nothing else was told meanwhile"


@pytest.mark.parametrize(
    "fault", all_deep_but(1, ["410", "410 event", "500", "stall", "drop", "malformed", "early"])
)
async def test_a_watch_that_never_works_is_neither_needed_nor_asked_for_without_end(fault: str) -> None:
    server = FakeKubernetes(FACTOR)
    server.watch_faults += [fault] * 1000  # type: ignore[list-item]
    async with discovering(server) as told:
        await until(lambda: server.lists)
        server.put("a", [pod("10.0.0.1")])
        await becomes(told, ["10.0.0.1"])
        before = server.lists
        await asyncio.sleep(10 / FACTOR)
        assert server.lists - before < 60, "more than 6 lists a second"


async def test_staleness_grows_while_the_server_is_away_and_ends_with_it() -> None:
    server = FakeKubernetes(FACTOR)
    server.put("a", [pod("10.0.0.1")])
    async with discovering(server) as told:
        assert told.discovery.staleness_s == float("inf")
        await becomes(told, ["10.0.0.1"])
        assert told.discovery.staleness_s < 5 / FACTOR
        server.away = True
        await until(lambda: told.discovery.staleness_s > 5 / FACTOR)
        assert told.now == ["10.0.0.1"]
        server.away = False
        await until(lambda: told.discovery.staleness_s < 1 / FACTOR)


async def test_credentials_are_read_anew_when_they_are_refused() -> None:
    server = FakeKubernetes(FACTOR, token="first")
    server.put("a", [pod("10.0.0.1")])
    async with discovering(server) as told:
        await becomes(told, ["10.0.0.1"])
        server.token = "second"
        server.put("a", [pod("10.0.0.2")])
        server.drop()
        await becomes(told, ["10.0.0.2"])


async def test_a_fixed_list_is_told_once_and_never_stale() -> None:
    told: list[Sequence[Endpoint]] = []
    task = asyncio.create_task(StaticDiscovery(["10.0.0.1:9"]).run(told.append))
    await asyncio.sleep(0.01)
    task.cancel()
    assert [[one.address for one in each] for each in told] == [["10.0.0.1:9"]]
    assert StaticDiscovery([]).staleness_s == 0
