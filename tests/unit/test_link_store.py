"""Where the two ends of a gloo or NCCL link meet: a store over one socket, which is free again afterwards."""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import cast

import pytest
import torch
from torch.distributed import ProcessGroup, ProcessGroupGloo

from baton.transport.base import TransferError
from baton.transport.torch_store import LinkStore

PATIENCE_S = 20.0


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


def at_once(*calls: Callable[[], None]) -> None:
    """Each on a thread of its own. Raises what one of them raised."""
    errors: list[Exception] = []

    def run(call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 (raised below)
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE_S)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("seed", range(8))
def test_each_end_hears_all_that_the_other_says_and_the_socket_is_free_afterwards(
    seed: int, sockets: tuple[socket.socket, socket.socket]
) -> None:
    rng = random.Random(seed)
    said = [
        {f"{rank}/{n}": rng.randbytes(rng.choice((0, 1, 170, 6_000))) for n in range(9)} for rank in (0, 1)
    ]

    def meet(rank: int) -> None:
        meeting, order = LinkStore(sockets[rank], PATIENCE_S), list(said[1 - rank])
        rng.shuffle(order)
        for key, value in said[rank].items():
            meeting.set(key, value)
            if rank and order:
                assert meeting.get(order[0]) == said[0][order.pop(0)]
        meeting.wait(order, timedelta(seconds=1))
        assert meeting.check([*said[0], *said[1]]) and not meeting.check(["2/0"])
        assert {key: meeting.get(key) for key in said[1 - rank]} == said[1 - rank]
        meeting.leave()
        meeting.set("later", b"for itself")
        assert meeting.get("later") == b"for itself"
        sockets[rank].sendall(b"%d" % rank)
        assert sockets[rank].recv(9) == b"%d" % (1 - rank), "nothing of the meeting is left in the socket"

    at_once(lambda: meet(0), lambda: meet(1))


def test_gloo_meets_there(sockets: tuple[socket.socket, socket.socket]) -> None:
    results = [torch.zeros(3), torch.zeros(3)]

    def meet(rank: int) -> None:
        meeting = LinkStore(sockets[rank], PATIENCE_S)
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=PATIENCE_S)
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        group: object = ProcessGroupGloo(meeting, rank, 2, options)
        meeting.leave()
        results[rank] += rank + 1
        cast(ProcessGroup, group).allreduce([results[rank]]).wait()

    at_once(lambda: meet(0), lambda: meet(1))
    assert [result.tolist() for result in results] == [[3.0] * 3] * 2


def test_a_peer_that_goes_ends_it(sockets: tuple[socket.socket, socket.socket]) -> None:
    meeting = LinkStore(sockets[0], PATIENCE_S)
    sockets[1].sendall(struct.pack("!HI", 3, 3) + b"0/")
    threading.Timer(0.05, sockets[1].shutdown, (socket.SHUT_RDWR,)).start()
    with pytest.raises(TransferError, match="closed the connection"):
        meeting.get("0/0")


def test_a_peer_that_says_nothing_is_not_waited_for_any_longer(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    meeting, began = LinkStore(sockets[0], 0.2), time.monotonic()
    with pytest.raises(TransferError, match="in time"):
        meeting.leave()
    assert 0.2 <= time.monotonic() - began < PATIENCE_S


def test_a_peer_that_left_is_not_waited_for(sockets: tuple[socket.socket, socket.socket]) -> None:
    sockets[1].sendall(struct.pack("!HI", 0, 0))
    with pytest.raises(TransferError, match="has left"):
        LinkStore(sockets[0], PATIENCE_S).get("0/0")


@pytest.mark.parametrize(("key_bytes", "value_bytes"), [(1025, 1), (1, 65537)])
def test_nobody_makes_it_take_in_much(
    key_bytes: int, value_bytes: int, sockets: tuple[socket.socket, socket.socket]
) -> None:
    sockets[1].sendall(struct.pack("!HI", key_bytes, value_bytes))
    with pytest.raises(TransferError, match="no place"):
        LinkStore(sockets[0], PATIENCE_S).get("0/0")


def test_nobody_keeps_it_going_with_things_that_are_not_awaited(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    for number in range(65):
        sockets[1].sendall(struct.pack("!HI", 2, 0) + b"%02d" % number)
    with pytest.raises(TransferError, match="more than 64"):
        LinkStore(sockets[0], PATIENCE_S).get("0/0")
