"""``ucx`` with a pool on a CUDA device: its threads have the device's context, and its way is one that works.

UCX itself runs, over TCP. The device is a fake one, which UCX does not see.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.transport import ucx
from baton.transport.base import DeviceStaging, DeviceView, TransferError
from baton.transport.cuda_ipc import HANDLE_BYTES, UUID_BYTES, CudaIpc, host_id
from baton.transport.pool_memory import PoolMemory
from baton.transport.staging import DEVICE_PIECE_BYTES, LARGEST_PIECE_BYTES, Staging, StagingRoom
from baton.transport.ucx import _AM, _GET, UcxConnector, _Hello
from tests.support.fake_cuda.device import FakeCuda
from tests.support.links import within

pytestmark = pytest.mark.deep

pytest.importorskip("ucxx")

OVER_TCP = {"TLS": "tcp"}


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with FakeCuda() as fake:
        yield fake


class Watched(PoolMemory):
    """A pool that knows which threads copied from and to it."""

    def __init__(self, pool: Tensor) -> None:
        super().__init__(pool)
        self.pool = pool
        self.copiers: set[str] = set()
        self.entered: list[str] = []

    def enter(self) -> None:
        self.entered.append(threading.current_thread().name)
        super().enter()

    def part(self, *args: Any) -> Any:
        part: Any = super().part(*args)
        plain = part.gather, part.scatter

        def gather(blocks: Sequence[int], into: memoryview) -> None:
            self.copiers.add(threading.current_thread().name)
            plain[0](blocks, into)

        def scatter(blocks: Sequence[int], piece: memoryview) -> None:
            self.copiers.add(threading.current_thread().name)
            plain[1](blocks, piece)

        part.gather, part.scatter = gather, scatter
        return part


def pool_of(num_blocks: int, seed: int | None) -> Watched:
    shape = (num_blocks, 2, 3, 2, 16, 8)
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    pool = (torch.zeros(shape) if seed is None else torch.randn(shape, generator=generator)).cuda()
    torch.cuda.synchronize()
    return Watched(pool)


def connector_of(memory: PoolMemory) -> UcxConnector:
    settings = memory.connector_settings(lambda: None, "127.0.0.1")
    return UcxConnector(
        settings.staging,
        settings.on_crash,
        OVER_TCP,
        settings.device_staging,
        settings.enter_thread,
    )


async def test_every_thread_that_meets_ucx_has_the_devices_context(cuda: FakeCuda) -> None:
    """UCX reads a null pointer when a thread without a context is about to sleep, and takes no CUDA IPC when
    it starts on one."""
    memory = pool_of(2, 1)
    connector = connector_of(memory)
    assert memory.entered[0] == threading.current_thread().name, "before UCX starts"
    [driver] = connector._drivers.values()
    copied = threading.Event()
    driver.call(lambda: driver.copy_on_thread(lambda: None, copied.set))
    await asyncio.to_thread(copied.wait, 10)
    assert set(memory.entered[1:]) == {"kv-ucx-am", "kv-ucx-copy_0"}
    await connector.close()


async def test_blocks_go_by_way_of_pinned_memory_in_few_large_pieces(cuda: FakeCuda) -> None:
    source, target = pool_of(64, 1), pool_of(64, None)
    prefill, decode = connector_of(source), connector_of(target)
    address, token = await decode.listen("127.0.0.1", 0), os.urandom(32)
    receiver = decode.expect(token, target.part(16), lambda: None)
    sender = await prefill.connect(address, token, source.part(16), lambda: None)
    number = torch.zeros(1).cuda()
    torch.cuda.synchronize()
    number.add_(1)
    moved = [(range(20, 30), range(40, 50)), ([9, 1, 20], [0, 30, 12])]
    received = [receiver.post_receive(tag, to) for tag, (_, to) in enumerate(moved)]
    sent = [sender.send(tag, origin) for tag, (origin, _) in enumerate(moved)]
    await within(asyncio.gather(*sent, *received))  # type: ignore[arg-type]
    for origin, to in moved:
        assert torch.equal(cuda.peek(target.pool)[list(to)], cuda.peek(source.pool)[list(origin)])
    assert cuda.peek(number).item() == 0, "the step has not run"
    assert source.copiers == target.copiers == {"kv-ucx-copy_0"}, "not the thread of all links"
    for end in (sender, receiver, prefill, decode):
        await end.close()


async def test_pieces_keep_their_order_and_a_close_in_the_middle_gives_all_back(cuda: FakeCuda) -> None:
    source, target = pool_of(64, 1), pool_of(64, None)
    prefill, decode = connector_of(source), connector_of(target)
    address, token = await decode.listen("127.0.0.1", 0), os.urandom(32)
    receiver = decode.expect(token, target.part(16), lambda: None)
    sender = await prefill.connect(address, token, source.part(16), lambda: None)
    assert isinstance(sender, ucx.UcxSendingLink)
    sender._piece_bytes = receiver.piece_bytes = 3 * source.part(16).form_of([0]).nbytes  # type: ignore[attr-defined]
    received = receiver.post_receive(1, range(32))
    await within(asyncio.gather(sender.send(1, range(31, -1, -1)), received))  # type: ignore[arg-type]
    assert torch.equal(cuda.peek(target.pool)[:32], cuda.peek(source.pool)[:32].flip(0))
    posted = [asyncio.ensure_future(receiver.post_receive(tag, range(32))) for tag in range(2, 8)]
    unsent = [asyncio.ensure_future(sender.send(tag, range(32))) for tag in range(2, 8)]
    await asyncio.sleep(0)
    await asyncio.gather(sender.close(), receiver.close())
    ended = await asyncio.gather(*posted, *unsent, return_exceptions=True)
    assert all(end is None or isinstance(end, TransferError) for end in ended)
    for rooms in (prefill._sending, decode._receiving):
        assert rooms.on_host._held == 0
    await prefill.close()
    await decode.close()


async def test_a_piece_that_needs_no_copy_does_not_overtake_one_that_does(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = pool_of(64, 1), pool_of(64, None)
    prefill, decode = connector_of(source), connector_of(target)
    address, token = await decode.listen("127.0.0.1", 0), os.urandom(32)
    receiver = decode.expect(token, target.part(16), lambda: None)
    sender = await prefill.connect(address, token, source.part(16), lambda: None)
    sender._piece_bytes = source.part(16).form_of([0]).nbytes  # type: ignore[attr-defined]
    content = cuda.peek(source.pool)

    def views(blocks: Sequence[int]) -> list[memoryview]:
        """Every other block is where UCX reads it by itself."""
        return [content[blocks[0]].view(torch.uint8).view(-1).numpy().data] if blocks[0] % 2 else []

    monkeypatch.setattr(sender, "_views", views)
    received = receiver.post_receive(1, range(16))
    await within(asyncio.gather(sender.send(1, range(16)), received))  # type: ignore[arg-type]
    assert torch.equal(cuda.peek(target.pool)[:16], content[:16])
    for end in (sender, receiver, prefill, decode):
        await end.close()


class Ipc:
    """A process that sees some devices, and can open some pools."""

    uuid = b"d" * UUID_BYTES

    def __init__(self, visible: Sequence[bytes], openable: Sequence[bytes]) -> None:
        self.visible = frozenset(visible)
        self._openable = openable

    def handle(self, pointer: int) -> bytes:
        return b"h" * HANDLE_BYTES

    def opens(self, handle: bytes) -> bool:
        return handle in self._openable


@pytest.fixture
async def decode() -> AsyncIterator[UcxConnector]:
    connector = UcxConnector(Staging(), lambda: None, OVER_TCP)
    yield connector
    await connector.close()


def on_device(connector: UcxConnector, ipc: Ipc | None) -> None:
    def allocate(size: int) -> DeviceView:
        raise AssertionError("nothing moves here")

    room = StagingRoom(DEVICE_PIECE_BYTES, allocate, DEVICE_PIECE_BYTES)
    both = DeviceStaging(room, room)
    connector._sending = replace(connector._sending, on_device=both.sending)
    connector._receiving = replace(connector._receiving, on_device=both.receiving)
    connector._has_cma = False
    connector._ipc = ipc  # type: ignore[assignment]


PEER = _Hello(
    place=b"",
    rdma=False,
    on_device=True,
    piece_bytes=DEVICE_PIECE_BYTES,
    host=host_id(),
    pid=os.getpid() + 1,
    uuid=Ipc.uuid,
    handle=b"h" * HANDLE_BYTES,
)


class TestWay:
    def test_a_pool_in_another_pod_of_the_node_is_read_there(self, decode: UcxConnector) -> None:
        on_device(decode, Ipc([PEER.uuid], [PEER.handle]))
        assert decode._way(PEER) == (_GET, "decode has opened prefill's pool")

    @pytest.mark.parametrize(
        ("changed", "why"),
        [
            ({"host": b"x" * 32}, "the two are not on one host"),
            ({"uuid": b"e" * UUID_BYTES}, "decode does not see prefill's device"),
            ({"handle": b"i" * HANDLE_BYTES}, "decode cannot open prefill's pool"),
            ({"handle": bytes(HANDLE_BYTES)}, "one end has no CUDA IPC"),
            ({"pid": os.getpid()}, "both processes have the number"),
        ],
    )
    def test_unless_ucx_would_not(self, decode: UcxConnector, changed: dict[str, Any], why: str) -> None:
        on_device(decode, Ipc([PEER.uuid], [PEER.handle]))
        way, reason = decode._way(replace(PEER, **changed))
        assert way == _AM
        assert why in reason

    def test_without_cuda_ipc_here(self, decode: UcxConnector) -> None:
        on_device(decode, None)
        assert decode._way(PEER)[0] == _AM

    def test_rdma_goes_first_and_needs_both_ends(self, decode: UcxConnector) -> None:
        on_device(decode, None)
        assert decode._way(replace(PEER, rdma=True))[0] == _AM
        decode._has_rdma = True
        assert decode._way(replace(PEER, rdma=True)) == (_GET, "both ends have RDMA")
        assert decode._way(PEER)[0] == _AM

    def test_a_host_pool_and_a_device_pool_meet_over_buffers(self, decode: UcxConnector) -> None:
        assert decode._way(PEER)[0] == _AM
        on_device(decode, Ipc([PEER.uuid], [PEER.handle]))
        assert decode._way(replace(PEER, on_device=False, place=ucx._place()))[0] == _AM

    def test_cross_memory_attach_is_for_host_pools_at_one_place(self, decode: UcxConnector) -> None:
        decode._has_cma = True
        near = replace(PEER, on_device=False, place=ucx._place())
        assert decode._way(near)[0] == _GET
        assert decode._way(replace(near, place=bytes(32)))[0] == _AM


class TestHello:
    def test_is_heard_as_it_was_said(self) -> None:
        heard = _Hello.of(PEER.packed())
        assert heard == replace(PEER, place=bytes(32))

    @pytest.mark.parametrize("piece_bytes", [0, LARGEST_PIECE_BYTES + 1])
    def test_pieces_of_no_size_that_a_sender_makes(self, piece_bytes: int) -> None:
        with pytest.raises(TransferError, match=f"pieces have {piece_bytes} bytes"):
            _Hello.of(replace(PEER, piece_bytes=piece_bytes).packed())

    def test_tells_of_the_pool_what_it_takes_to_open_it(self, cuda: FakeCuda, decode: UcxConnector) -> None:
        on_device(decode, Ipc([], []))
        memory = PoolMemory(torch.zeros(4, 2, 3, 2, 16, 8, device="cuda"))
        hello = decode._hello(memory.part(16))
        assert (hello.host, hello.uuid, hello.handle) == (host_id(), Ipc.uuid, b"h" * HANDLE_BYTES)
        assert (hello.on_device, hello.piece_bytes) == (True, DEVICE_PIECE_BYTES)
        assert decode._hello(memory.part(8)).handle == b"", "parts of pages have no memory of their own"


class Driver:
    """The CUDA driver's library, with two devices, of which the second is the thread's."""

    uuids = (b"a" * UUID_BYTES, b"b" * UUID_BYTES)

    def __init__(self) -> None:
        self.status = 0
        self.closed: list[int] = []

    def cuCtxGetDevice(self, device: Any) -> int:  # noqa: N802
        device._obj.value = 1
        return self.status

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = 2
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:  # noqa: N802
        device._obj.value = ordinal
        return 0

    def cuDeviceGetUuid(self, uuid: Any, device: ctypes.c_int) -> int:  # noqa: N802
        uuid._obj[:] = self.uuids[device.value]
        return 0

    def cuIpcGetMemHandle(self, handle: Any, pointer: ctypes.c_uint64) -> int:  # noqa: N802
        handle._obj.reserved[:] = pointer.value.to_bytes(HANDLE_BYTES)
        return self.status

    def cuIpcOpenMemHandle_v2(self, pointer: Any, handle: Any, flags: int) -> int:  # noqa: N802
        pointer._obj.value = int.from_bytes(bytes(handle.reserved))
        return self.status

    def cuIpcCloseMemHandle(self, pointer: ctypes.c_uint64) -> int:  # noqa: N802
        self.closed.append(pointer.value)
        return 0


class TestCudaIpc:
    def test_handles_of_one_process_open_in_another(self) -> None:
        library = Driver()
        ipc = CudaIpc(lambda _: library)  # type: ignore[arg-type, return-value]
        assert (ipc.uuid, ipc.visible) == (Driver.uuids[1], frozenset(Driver.uuids))
        handle = ipc.handle(0x7F0012345678)
        assert len(handle) == HANDLE_BYTES
        assert ipc.opens(handle)
        assert library.closed == [0x7F0012345678]

    def test_memory_that_has_no_handle(self) -> None:
        library = Driver()
        ipc = CudaIpc(lambda _: library)  # type: ignore[arg-type, return-value]
        library.status = 1
        assert ipc.handle(1) == b""
        assert not ipc.opens(b"h" * HANDLE_BYTES)
        assert library.closed == []

    def test_a_thread_without_a_context(self) -> None:
        library = Driver()
        library.status = 201
        with pytest.raises(OSError, match="cuCtxGetDevice ended with the CUDA error 201"):
            CudaIpc(lambda _: library)  # type: ignore[arg-type, return-value]
