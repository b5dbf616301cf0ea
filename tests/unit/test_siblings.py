"""What the processes of one router say to each other."""

from __future__ import annotations

import asyncio
import math
import socket
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.exposition import generate_latest

from baton.process.options import ConfigError
from baton.router.config import RouterConfig
from baton.router.processes import siblings
from baton.router.processes.figures import Together, families, pack, unpack
from baton.router.processes.siblings import Siblings
from baton.router.processes.slot import ProcessSlot


def place(directory: Path, index: int, count: int = 3) -> ProcessSlot:
    return ProcessSlot(index, count, socket.socket(), directory, 0, lambda: None, lambda: None)


async def said(by: str, about: bytes) -> bytes:
    return by.encode() + about


async def test_each_hears_the_answers_of_those_that_have_one(tmp_path: Path) -> None:
    three = [Siblings(place(tmp_path, index)) for index in range(3)]
    three[0].on("name", lambda about: said("first", about))
    three[1].on("name", lambda about: said("second", about))
    three[2].on("name", lambda about: said("", b""))
    async with three[0].listening(), three[1].listening(), three[2].listening():
        assert await three[0].ask("name", b"!") == {1: b"second!", 2: b""}
        assert await three[2].ask("name") == {0: b"first", 1: b"second"}
        assert await three[1].ask("what nobody knows") == {}
    assert await three[0].ask("name") == {}, "nobody listens any more"
    async with Siblings(place(tmp_path, 1)).listening():  # takes the place of one that died
        assert await three[0].ask("name") == {}


async def test_one_that_hangs_or_says_too_much_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(siblings, "ASK_S", 0.1)
    monkeypatch.setattr(siblings, "MAX_ANSWER", 100)
    three = [Siblings(place(tmp_path, index)) for index in range(3)]

    async def hang(_: bytes) -> bytes:
        await asyncio.sleep(60)
        return b"late"

    three[1].on("page", hang)
    three[2].on("page", lambda about: said("x" * 101, about))
    async with three[1].listening(), three[2].listening():
        assert await three[0].ask("page") == {}
        three[1].on("page", lambda about: said("x" * 100, about))
        monkeypatch.setattr(siblings, "ASK_S", 30.0)
        assert list(await three[0].ask("page")) == [1]


async def test_a_router_of_one_process_asks_nobody() -> None:
    alone = Siblings()
    alone.on("name", lambda about: said("me", about))
    async with alone.listening():
        assert not alone.several and await alone.ask("name") == {}


def test_figures_of_all_processes_are_on_one_page() -> None:
    pages = {}
    for index in range(2):
        registry = CollectorRegistry()
        counter = Counter("requests", "Those answered.", ("status",), registry=registry)
        counter.labels("200").inc(index + 1)
        Gauge("odd", "Not a number.", registry=registry).set(math.nan if index else math.inf)
        pages[index] = unpack(pack(families(registry.collect())))
    page = generate_latest(Together(pages)).decode()
    assert page.count("# TYPE requests_total counter") == 1
    for line in (
        'requests_total{process="0",status="200"} 1.0',
        'requests_total{process="1",status="200"} 2.0',
        'odd{process="0"} +Inf',
        'odd{process="1"} NaN',
    ):
        assert line in page


@pytest.mark.parametrize("processes", [0, 65])
def test_how_many_processes_there_may_be(processes: int) -> None:
    with pytest.raises(ConfigError, match=f"--processes: must be .*, not {processes}"):
        RouterConfig(workers=("127.0.0.1:1",), processes=processes)
