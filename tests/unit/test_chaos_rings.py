"""The rings of ``loadtest.chaos``: room for any model in a worker, and the connections that are cut."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.chaos.connections import Connection, End
from tests.support.chaos.faults import streams_alone
from tests.support.chaos.fleet import BLOCK_SIZE, ROOM, Member, pages_of
from tests.support.chaos.streams import STREAMS_ROOM, made, worker_options
from tests.support.ring import Service

ROUTER = 1


@pytest.mark.parametrize(
    ("name", "pages"), [("llama", 80), ("deepseek-v3", 80), ("falcon-h1", 83), ("gemma3", 94)]
)
def test_a_worker_has_room_for_one_or_two_sequences_of_any_model(
    name: str, pages: int, tmp_path: Path
) -> None:
    assert ROOM == 1280
    assert pages_of(Path(made(tmp_path, name))) == pages


def test_the_demo_model_has_a_block_a_page() -> None:
    assert worker_options("demo")[-2:] == ("--num-blocks", str(STREAMS_ROOM // BLOCK_SIZE))


def test_no_connection_is_cut_that_may_carry_beats() -> None:
    one, other = (
        Member(Service(f"prefill-{at}", (), Path()), "prefill", 12_000 + at, range(0)) for at in range(2)
    )
    stream, beats, alone = (
        Connection((End(ROUTER, fd, "", 40_000 + fd), End(pid, fd, "", port)))
        for fd, pid, port in ((3, 2, 12_000), (4, 2, 12_000), (5, 3, 12_001))
    )
    assert streams_alone([(stream, one), (alone, other), (beats, one)]) == [(alone, other)]
    assert streams_alone([(stream, one), (alone, other)]) == [(stream, one), (alone, other)]
