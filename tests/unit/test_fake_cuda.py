"""The fake CUDA device keeps what CUDA promises, and nothing that it does not."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Literal, get_args

import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from baton.transport.base import DeviceView
from baton_kernels.activation import GELU_TANH, SILU
from baton_kernels.cuda import rows, whole_norm
from baton_kernels.cuda.blocks import copy_blocks
from baton_kernels.norm import Norm
from baton_kernels.rotary import WholeNorm
from tests.support.fake_cuda.device import FakeCuda
from tests.support.fake_cuda.streams import Order

ORDERS = get_args(Order)


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    """A device that does nothing before somebody waits for it."""
    with FakeCuda(memory_bytes=1 << 20, devices=2) as device:
        yield device


def _normed_heads(x: Tensor, ranks: int) -> Tensor:
    norm = WholeNorm(x[0, :32].clone(), x[1, :16].clone(), 1e-5, offset=1.0)
    if ranks == 1:
        whole_norm.norm_heads(x, norm)
    else:
        squares = whole_norm.squares_of_heads(x, norm) * ranks
        whole_norm.scale_heads(x, squares, norm, (32 * ranks, 16 * ranks))
    return x


def _added(x: Tensor) -> Tensor:
    post, norm = Norm(x[0], 1e-5, offset=1.0), Norm(x[1], 1e-5, centered=True, bias=x[2])
    residual = x * 2
    return torch.cat((rows.add_norm(x, residual, norm, x.dtype, post=post, factor=0.5), residual))


LAUNCHES: Mapping[str, tuple[str, Callable[[Tensor], Tensor]]] = MappingProxyType(
    {
        "gated product": ("_gated_product", lambda x: rows.gated_product(x, GELU_TANH)),
        "activation": ("_activated", lambda x: rows.activated(x, SILU)),
        "norms": ("_add_norm", _added),
        "norm alone": ("_add_norm", lambda x: rows.add_norm(None, x, Norm(x[0], 1e-5), torch.float16)),
        "norm of heads": ("_whole_norm", lambda x: _normed_heads(x, 1)),
        "norm of heads of ranks": ("_squares", lambda x: _normed_heads(x, 2)),
    }
)
"""Calls of the entries of kernels on x [3, 64], and a kernel that each launches."""


def new_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def settle(*streams: torch.cuda.Stream) -> None:
    for stream in streams or (torch.cuda.current_stream(),):
        stream.synchronize()


def test_it_is_there_only_while_it_is_installed() -> None:
    with FakeCuda():
        assert torch.cuda.is_available()
        assert torch.zeros(3, device="cuda").device == torch.device("cuda", 0)
        assert torch.empty(3, pin_memory=True).is_pinned()
    assert not torch.cuda.is_available()
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(3, device="cuda")
    with pytest.raises(RuntimeError):
        torch.empty(3, pin_memory=True)


class TestTensors:
    def test_what_is_computed_is_what_a_cpu_computes(self, cuda: FakeCuda) -> None:
        def compute(device: str) -> list[Tensor]:
            x = torch.arange(24, device=device).view(4, 6).float() / 7
            x[1] = 3
            x[[2, 0], :2] *= 2
            x[:, 4] = x[:, 5]
            halves = x.chunk(2, dim=-1)
            halves[0].add_(1)
            index = torch.tensor([2, 0, 1], device=device)
            scores = torch.nn.functional.linear(x, x.roll(1, 0)).softmax(-1)
            into = torch.zeros(3, 6, device=device)
            torch.index_select(x, 0, index, out=into)
            counted = torch.zeros(4, dtype=torch.int64, device=device)
            torch.cumsum(torch.ones(3, device=device), 0, dtype=torch.int64, out=counted[1:])
            kept = x[x > 2]
            results = [x, *halves, scores, into, counted, kept, x.bfloat16().T.contiguous().view(torch.int16)]
            return [result.cpu() for result in results]

        for expected, found in zip(compute("cpu"), compute("cuda"), strict=True):
            assert torch.equal(found, expected)

    def test_views_share_memory(self, cuda: FakeCuda) -> None:
        x = torch.zeros(2, 6, device="cuda")
        with torch.inference_mode():
            x[:, :2] = torch.ones(2, 2, device="cuda")
            x.view(-1)[5:].view(torch.int32).zero_()
        assert x.tolist() == [[1, 1, 0, 0, 0, 0], [0] * 6]

    def test_new_memory_holds_garbage(self, cuda: FakeCuda) -> None:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert torch.empty(3, dtype=dtype, device="cuda").isnan().all()
        with pytest.raises(RuntimeError, match="device-side assert"):
            torch.zeros(3, device="cuda")[torch.empty(1, dtype=torch.int64, device="cuda")].tolist()

    def test_the_host_cannot_read_it(self, cuda: FakeCuda) -> None:
        x = torch.zeros(4, dtype=torch.uint8, device="cuda")
        for read in (x.numpy, x.__array__, lambda: memoryview(x)):  # type: ignore[arg-type]
            with pytest.raises(TypeError):
                read()
        with pytest.raises(RuntimeError, match="same device"):
            x + torch.zeros(4, dtype=torch.uint8)

    @pytest.mark.deep
    def test_an_address_of_it_means_nothing_to_the_host(self) -> None:
        read = (
            "import ctypes, tests.support.interpreted, torch\n"
            "from tests.support.fake_cuda.device import FakeCuda\n"
            "with FakeCuda(): ctypes.string_at(torch.zeros(4, device='cuda').data_ptr(), 1)\n"
        )
        ended = subprocess.run([sys.executable, "-c", read], check=False, capture_output=True)
        assert ended.returncode == -11

    def test_an_interface_leads_back_to_the_memory(self, cuda: FakeCuda) -> None:
        x = torch.zeros(8, dtype=torch.uint8, device="cuda")
        torch.as_tensor(DeviceView(0, x[2:].data_ptr(), 2), device="cuda").fill_(7)
        assert x.tolist() == [0, 0, 7, 7, 0, 0, 0, 0]

    def test_a_mistake_of_the_device_ends_it(self, cuda: FakeCuda) -> None:
        torch.zeros(3, device="cuda")[torch.tensor([5], device="cuda")]
        with pytest.raises(torch.AcceleratorError, match="device-side assert"):
            settle()
        with pytest.raises(torch.AcceleratorError, match="device-side assert"):
            torch.zeros(3, device="cuda")


class TestMemory:
    def test_it_is_counted_and_ends(self, cuda: FakeCuda) -> None:
        free, total = torch.cuda.mem_get_info()
        assert (free, total) == (1 << 20, 1 << 20)
        x = torch.zeros(1 << 16, device="cuda")
        assert torch.cuda.memory_allocated() == x.nbytes == 1 << 18
        del x
        assert (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()) == (0, 1 << 18)
        assert torch.cuda.memory_reserved() == 1 << 18
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == 0
        kept = [torch.zeros(1 << 16, device="cuda") for _ in range(4)]
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(1, device="cuda")
        del kept
        assert torch.zeros((1 << 18) - 256, device="cuda").sum().item() == 0

    @pytest.mark.parametrize("recorded", [True, False])
    def test_memory_that_another_stream_uses(self, recorded: bool, cuda: FakeCuda) -> None:
        """The allocator gives it to the next operation, unless it was told."""
        side = new_stream()
        x = torch.ones(4, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x * 2
        if recorded:
            x.record_stream(side)
        address = x.data_ptr()
        del x
        z = torch.zeros(4, device="cuda")
        settle()
        assert (z.data_ptr() == address) is not recorded
        with torch.cuda.stream(side):
            assert (y.tolist() == [2.0] * 4) is recorded

    def test_memory_of_the_same_stream_comes_back_at_once(self, cuda: FakeCuda) -> None:
        x = torch.ones(4, device="cuda")
        y, address = x * 2, x.data_ptr()
        del x
        assert torch.zeros(4, device="cuda").data_ptr() == address
        assert y.tolist() == [2.0] * 4


class TestCopies:
    def test_pageable_memory_is_read_at_once(self, cuda: FakeCuda) -> None:
        source = torch.ones(4)
        x = source.to("cuda", non_blocking=True)
        source.zero_()
        assert x.tolist() == [1.0] * 4

    def test_a_pinned_buffer_is_read_when_the_copy_runs(self, cuda: FakeCuda) -> None:
        source = torch.ones(4, pin_memory=True)
        x = source.to("cuda", non_blocking=True)
        source.zero_()
        assert x.tolist() == [0.0] * 4
        source.fill_(2)
        y = source.to("cuda")
        source.zero_()
        assert y.tolist() == [2.0] * 4

    def test_a_copy_out_is_there_when_it_has_run(self, cuda: FakeCuda) -> None:
        target = torch.zeros(4, pin_memory=True)
        target.copy_(torch.ones(4, device="cuda"), non_blocking=True)
        done = torch.cuda.current_stream().record_event()
        assert target.tolist() == [0.0] * 4
        done.synchronize()
        assert target.tolist() == [1.0] * 4

    def test_a_copy_to_pageable_memory_waits(self, cuda: FakeCuda) -> None:
        assert torch.zeros(4).copy_(torch.ones(4, device="cuda"), non_blocking=True).tolist() == [1.0] * 4

    def test_torch_pins_what_a_copy_out_makes(self, cuda: FakeCuda) -> None:
        made = torch.ones(4, device="cuda").to("cpu", non_blocking=True)
        assert made.is_pinned()
        assert made.tolist() != [1.0] * 4
        settle()
        assert made.tolist() == [1.0] * 4

    def test_registered_memory_is_pinned(self, cuda: FakeCuda) -> None:
        memory = torch.zeros(4)
        assert not memory.is_pinned()
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        assert memory[1:].is_pinned()
        cudart.cudaHostUnregister(memory.data_ptr())
        assert not memory.is_pinned()

    def test_pinned_memory_goes_with_its_last_tensor(self, cuda: FakeCuda) -> None:
        memory = torch.zeros(4, pin_memory=True)[2:]
        assert memory.is_pinned()
        start = memory.data_ptr()
        del memory
        assert not cuda.pinned.covers(start, start + 4)

    def test_devices_have_memory_of_their_own(self, cuda: FakeCuda) -> None:
        x = torch.ones(4, device="cuda:0")
        y = x.to("cuda:1")
        assert y.device.index == 1
        with pytest.raises(RuntimeError, match="same device"):
            x + y
        assert (y + 1).tolist() == [2.0] * 4


class TestStreams:
    @pytest.mark.parametrize("waits", [True, False])
    @pytest.mark.parametrize("order", ORDERS)
    def test_a_stream_sees_the_work_of_another_behind_its_event(self, order: Order, waits: bool) -> None:
        with FakeCuda(order=order):
            side = new_stream()
            x = torch.zeros(4, device="cuda")
            settle()
            x.fill_(1)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
            with torch.cuda.stream(side):
                if waits:
                    side.wait_event(done)
                y = x + 1
                found = y.tolist()
        if waits or order in ("early", "others_first"):
            assert found == [2.0] * 4
        elif order == "late":
            assert found == [1.0] * 4

    def test_others_may_come_first(self) -> None:
        """One stream reads what another is about to overwrite."""
        found = {}
        for order in ORDERS:
            with FakeCuda(order=order):
                x = torch.zeros(4, device="cuda")
                settle()
                y = x + 1
                with torch.cuda.stream(new_stream()):
                    x.fill_(7)
                found[order] = y.tolist()[0]
        assert (found["late"], found["early"], found["others_first"]) == (1, 1, 8)

    def test_asking_gets_on(self, cuda: FakeCuda) -> None:
        x = torch.zeros(4, device="cuda")
        done = torch.cuda.current_stream().record_event()
        assert not done.query()
        while not done.query():
            pass
        assert cuda.peek(x).tolist() == [0.0] * 4
        assert torch.cuda.current_stream().query()

    def test_an_event_is_of_the_work_when_it_was_recorded(self, cuda: FakeCuda) -> None:
        x = torch.zeros(4, device="cuda")
        done = torch.cuda.current_stream().record_event()
        x.fill_(1)
        done.synchronize()
        assert cuda.peek(x).tolist() == [0.0] * 4
        done.record()
        done.synchronize()
        assert cuda.peek(x).tolist() == [1.0] * 4

    def test_threads_have_streams_and_devices_of_their_own(self, cuda: FakeCuda) -> None:
        found: list[object] = []

        def other() -> None:
            found.append((torch.cuda.current_device(), torch.cuda.current_stream()))

        torch.cuda.set_device(1)
        with torch.cuda.stream(new_stream()):
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            assert torch.empty(1, device="cuda").device.index == 1
        assert found == [(0, torch.cuda.default_stream(0))]
        torch.cuda.set_device(0)

    def test_waiting_is_counted(self, cuda: FakeCuda) -> None:
        x = torch.zeros(4, device="cuda")
        before = sum(cuda.timeline.waits.values())
        x += 1
        assert sum(cuda.timeline.waits.values()) == before
        x.sum().item()
        assert sum(cuda.timeline.waits.values()) > before
        assert cuda.timeline.issued["operation aten.add_.Tensor"] == 1


class TestGraphs:
    def capture(self, x: Tensor) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x += 1
        return graph

    def test_what_is_captured_runs_when_it_is_replayed(self, cuda: FakeCuda) -> None:
        x = torch.zeros(4, device="cuda")
        graph = self.capture(x)
        assert x.tolist() == [0.0] * 4
        graph.replay()
        assert cuda.peek(x).tolist() == [0.0] * 4
        x *= 5
        graph.replay()
        assert x.tolist() == [6.0] * 4

    def test_its_memory_stays_its_own(self, cuda: FakeCuda) -> None:
        x, graph = torch.ones(4, device="cuda"), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x + 1
            z = y * 2
        address = y.data_ptr()
        del y
        others = [torch.zeros(4, device="cuda") for _ in range(8)]
        assert address not in [other.data_ptr() for other in others]
        graph.replay()
        assert z.tolist() == [4.0] * 4
        assert all(other.tolist() == [0.0] * 4 for other in others)

    @pytest.mark.parametrize(
        "forbidden",
        [
            lambda x: x.tolist(),
            lambda x: x.sum().item(),
            lambda x: x.copy_(torch.ones(4)),
            lambda x: torch.cuda.synchronize(),
            lambda x: torch.cuda.current_stream().synchronize(),
            lambda x: torch.cuda.default_stream().synchronize(),
            lambda x: x[x > 0],
            lambda x: torch.cuda.current_stream().wait_event(torch.cuda.default_stream().record_event()),
        ],
    )
    def test_nothing_may_wait_meanwhile(self, forbidden: object, cuda: FakeCuda) -> None:
        x, graph = torch.zeros(4, device="cuda"), torch.cuda.CUDAGraph()
        with pytest.raises(torch.AcceleratorError, match="capture"), torch.cuda.graph(graph):
            try:
                forbidden(x)  # type: ignore[operator]
            except torch.AcceleratorError:
                pass
            else:
                pytest.fail("it was allowed")
        assert x.tolist() == [0.0] * 4

    def test_a_capture_on_the_stream_of_another_device_is_empty(self, cuda: FakeCuda) -> None:
        x, graph = torch.zeros(4, device="cuda:1"), torch.cuda.CUDAGraph()
        with pytest.warns(UserWarning, match="Graph is empty"), torch.cuda.graph(graph):
            x += 1
        graph.replay()
        assert x.tolist() == [1.0] * 4, "it ran at once, and not again"
        torch.cuda.set_device(1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self.capture(x).replay()
        assert x.tolist() == [2.0] * 4
        torch.cuda.set_device(0)

    def test_a_stream_that_waits_for_the_capture_joins_it(self, cuda: FakeCuda) -> None:
        x, graph, side = torch.zeros(4, device="cuda"), torch.cuda.CUDAGraph(), new_stream()
        with torch.cuda.graph(graph):
            x += 1
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                x *= 3
            torch.cuda.current_stream().wait_stream(side)
        assert graph.launched == ("operation aten.add_.Tensor", "operation aten.mul_.Tensor")  # type: ignore[attr-defined]
        graph.replay()
        assert x.tolist() == [3.0] * 4


class TestKernels:
    @pytest.fixture
    def cuda(self) -> Iterator[FakeCuda]:
        with FakeCuda(memory_bytes=1 << 20, devices=2, kernels="interpreted") as device:
            yield device

    def test_they_run_when_their_stream_does(self, cuda: FakeCuda) -> None:
        x = torch.arange(8, device="cuda").view(4, 2)
        ids = torch.tensor([[0, 3], [1, 2]], device="cuda")
        settle()
        copy_blocks(x, ids[0], x, ids[1])
        assert cuda.peek(x).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert x.tolist() == [[2, 3], [2, 3], [4, 5], [4, 5]]
        assert cuda.timeline.issued["kernel _copy"] == 1

    def test_they_reach_pinned_memory_and_no_other_of_the_host(self, cuda: FakeCuda) -> None:
        x, ids, pinned = torch.ones(4, 2, device="cuda"), torch.tensor([1], device="cuda"), torch.zeros(4, 2)
        with pytest.raises(ValueError, match="cpu tensor"):
            copy_blocks(pinned, ids, x, ids)
        pinned = pinned.pin_memory()
        copy_blocks(pinned, ids, x, ids)
        assert not pinned.any()
        settle()
        assert pinned.tolist() == [[0, 0], [1, 1], [0, 0], [0, 0]]

    @pytest.mark.parametrize("block", [1 << 30, -(1 << 30)])
    def test_a_wild_address_ends_the_device(self, block: int, cuda: FakeCuda) -> None:
        x, there = torch.ones(4, 2, device="cuda"), torch.tensor([0], device="cuda")
        copy_blocks(x, there, x, torch.tensor([block], device="cuda"))
        with pytest.raises(torch.AcceleratorError) as raised:
            settle()
        assert "illegal memory access" in str(raised.value.__cause__)

    def test_they_run_on_the_current_device(self, cuda: FakeCuda) -> None:
        x, ids = torch.ones(4, 2, device="cuda:1"), torch.tensor([0], device="cuda:1")
        with pytest.raises(torch.AcceleratorError, match="launched on cuda:0"):
            copy_blocks(x, ids, x, ids)

    @pytest.mark.parametrize("name", list(LAUNCHES))
    def test_plain_and_interpreted_ones_agree(self, name: str) -> None:
        kernel, launch = LAUNCHES[name]
        torch.manual_seed(0)
        x, results = torch.randn(3, 64), []
        kinds: tuple[Literal["plain", "interpreted"], ...] = ("plain", "interpreted")
        for kernels in kinds:
            with FakeCuda(kernels=kernels) as device:
                results.append(launch(x.to("cuda")).cpu())
                assert device.timeline.issued[f"kernel {kernel}"] == 1
        torch.testing.assert_close(*results)

    def test_plain_ones_are_not_interpreted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(interpreter.InterpretedFunction, "rewrite", lambda self: pytest.fail("run"))
        with FakeCuda(kernels="plain"):
            for _, launch in LAUNCHES.values():
                launch(torch.randn(3, 64, device="cuda")).cpu()


class TestTime:
    def test_a_replay_takes_its_time_beside_the_host(self) -> None:
        with FakeCuda(step_seconds=0.2):
            x, graph = torch.zeros(4, device="cuda"), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                x += 1
            began = time.perf_counter()
            graph.replay()
            done = torch.cuda.current_stream().record_event()
            assert not done.query()
            with torch.cuda.stream(new_stream()):
                assert torch.ones(1, device="cuda").tolist() == [1.0]
            assert time.perf_counter() - began < 0.2, "another stream does not wait"
            done.synchronize()
            assert time.perf_counter() - began >= 0.2
            assert x.tolist() == [1.0] * 4

    def test_a_hollow_device_only_copies(self) -> None:
        with FakeCuda(step_seconds=0.0, hollow=True):
            x = torch.ones(4).to("cuda")
            assert x.tolist() == [1.0] * 4
            assert (x + 1).tolist() == [0.0] * 4
