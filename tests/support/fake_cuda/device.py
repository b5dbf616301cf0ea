"""A CUDA device that is not there.

While it is installed, ``torch.cuda`` is this: programs find a device, allocate on it, launch operations and
Triton kernels, use streams, events, graphs and pinned memory, on every thread, and need no change. What a
CUDA device does not promise, this one does not do: work runs later than it was issued (``streams.Order``),
new memory holds garbage, the host cannot look into device memory, and what is illegal raises what CUDA
raises. So a test finds a missing wait where a fast device would find it once a month.

What it does not show: speed (but see ``step_seconds``), races inside a kernel or a graph, and what kernels do
that triton's interpreter does not run.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal, Self

import torch
from torch import Tensor

from tests.support.fake_cuda import guard
from tests.support.fake_cuda.kernels import KernelLauncher
from tests.support.fake_cuda.memory import DeviceMemory, PinnedMemory
from tests.support.fake_cuda.plain_kernels import PlainKernels
from tests.support.fake_cuda.runtime import (
    CUDAGraph,
    CurrentStreams,
    DeviceContext,
    Event,
    Stream,
    StreamContext,
    graph,
)
from tests.support.fake_cuda.streams import Order, Queue, Timeline, cuda_error
from tests.support.fake_cuda.tensors import DeviceStorage, DeviceTensor, allocate, copy

Device = int | str | torch.device | None


class FakeCuda:
    """Fake CUDA devices, installed while this is entered; one at a time in a process."""

    def __init__(
        self,
        *,
        devices: int = 1,
        memory_bytes: int = 256 << 20,
        order: Order = "late",
        seed: int = 0,
        step_seconds: float | None = None,
        hollow: bool = False,
        processors: int = 2,
        kernels: Literal["plain", "interpreted"] = "plain",
    ) -> None:
        """``memory_bytes``: of each device. ``seed``: of the order ``random``.

        ``step_seconds``: the device runs by itself, beside the host, and the replay of a graph takes it this
        long; None: it runs when somebody waits for it. ``hollow``: it computes nothing, only copies move
        bytes, and memory is zero: for measurements of the host. ``processors``: multiprocessors.
        ``kernels``: what runs Triton's kernels, plain torch or triton's interpreter.
        """
        timed = step_seconds is not None
        self.timeline = Timeline(order, seed, timed)
        self.step_seconds = step_seconds or 0.0
        self.hollow = hollow
        self.timeline.hollow = hollow
        self.garbage = not hollow
        self.pinned = PinnedMemory()
        self.memory = [
            DeviceMemory(index, memory_bytes, self.timeline.mark, self._finish_all)
            for index in range(devices)
        ]
        self._processors = processors
        self._graph_pools = 0
        self._current = CurrentStreams()
        bound = {"cuda": self}
        self.Stream: type[Stream] = type("Stream", (Stream,), bound)
        self.Event: type[Event] = type("Event", (Event,), bound)
        self.CUDAGraph: type[CUDAGraph] = type("CUDAGraph", (CUDAGraph,), bound)
        self.graph: type[graph] = type("graph", (graph,), bound)
        self.stream: type[StreamContext] = type("StreamContext", (StreamContext,), bound)
        self.device: type[DeviceContext] = type("device", (DeviceContext,), bound)
        self._default = [self.Stream(index) for index in range(devices)]
        self._undo: list[Callable[[], object]] = []
        self._kernels = KernelLauncher(self)
        self._plain = PlainKernels(self).replacements() if kernels == "plain" else []

    def __enter__(self) -> Self:
        if torch.cuda.is_available():
            raise RuntimeError("there is a CUDA device already")
        with torch.device("cpu"):  # torch remembers its factories at their first use: they must be its own
            torch.empty(0)
        guard.install(len(self.memory))
        guard.set_device(0)
        self._undo.append(lambda: guard.install(0))
        self._install_factories()
        self._install_runtime()
        self._kernels.install()
        self._undo.append(self._kernels.uninstall)
        for owner, name, new in self._plain:
            self._replace(owner, name, new)
        return self

    def __exit__(self, *error: object) -> None:
        self.timeline.abandon()
        gc.collect()  # what is left may have something to give back to the device
        while self._undo:
            self._undo.pop()()
        self.timeline.close()

    def index_of(self, device: Device) -> int:
        """The number of a device as programs name it; None and ``cuda``: the current one."""
        if isinstance(device, int):
            index: int | None = device
        else:
            index = torch.device(device).index if device is not None else None
        index = guard.current_device() if index is None else index
        if not 0 <= index < len(self.memory):
            raise torch.AcceleratorError("CUDA error: invalid device ordinal")
        return index

    def current_device(self) -> int:
        return guard.current_device()

    def set_device(self, device: Device) -> None:
        guard.set_device(self.index_of(device))

    def current_stream(self, device: Device = None) -> Stream:
        index = self.index_of(device)
        return self._current.by_device.get(index, self._default[index])

    def default_stream(self, device: Device = None) -> Stream:
        return self._default[self.index_of(device)]

    def set_stream(self, stream: Stream) -> None:
        self._current.by_device[stream.queue.device] = stream
        guard.set_device(stream.queue.device)

    def current_queue(self, index: int) -> Queue:
        return self.current_stream(index).queue

    def default_queue(self, index: int) -> Queue:
        return self._default[index].queue

    def synchronize(self, device: Device = None) -> None:
        self.timeline.finish_device(self.index_of(device), "synchronize")

    def graph_pool_handle(self) -> tuple[int, int]:
        self._graph_pools += 1
        return (0, self._graph_pools)

    def real(self, storage: DeviceStorage, twin: Tensor) -> Tensor:
        """The numbers of a tensor of this shape in a storage."""
        memory = self.memory[storage.index].bytes.untyped_storage()
        offset = storage.block.offset // twin.element_size() + twin.storage_offset()
        return torch.empty(0, dtype=twin.dtype).set_(memory, offset, twin.size(), twin.stride())

    def kernel_argument(self, tensor: Tensor, index: int, name: str) -> Tensor:
        """The numbers of a tensor, for a kernel on device ``index``. AcceleratorError or ValueError for one
        that it cannot reach."""
        if isinstance(tensor, DeviceTensor):
            if tensor.storage_.index != index:
                raise cuda_error(
                    "an illegal memory access was encountered", f"{name} launched on cuda:{index}"
                )
            return tensor.content
        if not self.pinned.holds(tensor):
            raise ValueError(f"Pointer argument of {name} cannot be accessed from Triton (cpu tensor?)")
        return tensor

    def peek(self, tensor: Tensor) -> Tensor:
        """A copy of what a device tensor holds at this moment, whatever is on its way: for tests."""
        assert isinstance(tensor, DeviceTensor)
        return tensor.content.clone()

    def _empty_caches(self) -> None:
        for memory in self.memory:
            memory.empty_cache()

    def _finish_all(self) -> None:
        self.timeline.finish_device(None, "empty_cache")

    def _install_factories(self) -> None:
        library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        self._undo.append(library._destroy)

        def index_of(device: torch.device | None) -> int:
            return self.index_of(device)

        def empty(
            size: list[int],
            dtype: torch.dtype | None = None,
            layout: object = None,
            device: torch.device | None = None,
            pin_memory: bool | None = None,
            memory_format: torch.memory_format | None = None,
        ) -> Tensor:
            twin = torch.empty(
                size, dtype=dtype, device="meta", memory_format=memory_format or torch.contiguous_format
            )
            return allocate(self, index_of(device), twin)

        def empty_strided(
            size: list[int],
            stride: list[int],
            dtype: torch.dtype | None = None,
            layout: object = None,
            device: torch.device | None = None,
            pin_memory: bool | None = None,
        ) -> Tensor:
            twin = torch.empty_strided(size, stride, dtype=dtype, device="meta")
            return allocate(self, index_of(device), twin)

        def arange(
            start: float,
            end: float,
            step: float = 1,
            dtype: torch.dtype | None = None,
            layout: object = None,
            device: torch.device | None = None,
            pin_memory: bool | None = None,
        ) -> Tensor:
            numbers = torch.arange(start, end, step, dtype=dtype, device="cpu")
            return self._filled(numbers, index_of(device), "arange")

        def arange_to(end: float, **options: Any) -> Tensor:
            return arange(0, end, **options)

        library.impl("empty.memory_format", empty, "CUDA")
        library.impl("empty_strided", empty_strided, "CUDA")
        library.impl("arange", arange_to, "CUDA")
        library.impl("arange.start", arange, "CUDA")
        library.impl("arange.start_step", arange, "CUDA")
        # torch.tensor copies past the tensors' own dispatch.
        library.impl("copy_", copy, "CUDA")

    def _filled(self, numbers: Tensor, index: int, name: str) -> Tensor:
        """A new device tensor of these numbers, which the device makes."""
        twin = torch.empty_like(numbers, device="meta")
        tensor = allocate(self, index, twin)
        real = tensor.content
        self.timeline.issue(self.current_queue(index), "operation", name, lambda: real.copy_(numbers))
        return tensor

    def _install_runtime(self) -> None:
        names: dict[str, Any] = {
            "Stream": self.Stream,
            "Event": self.Event,
            "CUDAGraph": self.CUDAGraph,
            "graph": self.graph,
            "stream": self.stream,
            "device": self.device,
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "init": lambda: None,
            "_lazy_init": lambda: None,
            "device_count": lambda: len(self.memory),
            "current_device": self.current_device,
            "set_device": self.set_device,
            "current_stream": self.current_stream,
            "default_stream": self.default_stream,
            "set_stream": self.set_stream,
            "synchronize": self.synchronize,
            "graph_pool_handle": self.graph_pool_handle,
            "is_current_stream_capturing": lambda: self.current_stream().queue.capture is not None,
            "get_device_properties": self.properties,
            "get_device_name": lambda device=None: self.properties(device).name,
            "get_device_capability": lambda device=None: (9, 0),
            "is_bf16_supported": lambda including_emulation=True: True,
            "mem_get_info": self._free_and_total,
            "memory_allocated": lambda device=None: self._memory(device).allocated,
            "max_memory_allocated": lambda device=None: self._memory(device).peak,
            "memory_reserved": lambda device=None: self._memory(device).reserved,
            "reset_peak_memory_stats": lambda device=None: self._memory(device).reset_peak(),
            "empty_cache": self._empty_caches,
            "cudart": self._cudart,
            "check_error": _check_error,
        }
        for name, value in names.items():
            self._replace(torch.cuda, name, value)
        pinned, plain_as_tensor = self.pinned, torch.as_tensor

        def as_tensor(data: Any, *args: Any, **kwargs: Any) -> Tensor:
            interface = getattr(data, "__cuda_array_interface__", None)
            if interface is None or isinstance(data, Tensor):
                return plain_as_tensor(data, *args, **kwargs)
            return self._at(interface["data"][0], interface["shape"][0])

        self._replace(torch, "as_tensor", as_tensor)
        for name in ("empty", "zeros", "ones", "full", "tensor", "empty_strided"):
            self._replace(torch, name, _pinning(getattr(torch, name), pinned))
        self._replace(torch.Tensor, "is_pinned", lambda tensor, device=None: pinned.holds(tensor))
        self._replace(
            torch.Tensor,
            "pin_memory",
            lambda tensor, device=None: tensor if pinned.holds(tensor) else pinned.copy_of(tensor),
        )

    def properties(self, device: Device = None) -> SimpleNamespace:
        index = self.index_of(device)
        return SimpleNamespace(
            name="Fake",
            major=9,
            minor=0,
            total_memory=self.memory[index].size,
            multi_processor_count=self._processors,
            warp_size=32,
            L2_cache_size=1 << 20,
            uuid=f"00000000-0000-0000-0000-{index:012d}",
        )

    def _memory(self, device: Device) -> DeviceMemory:
        return self.memory[self.index_of(device)]

    def _free_and_total(self, device: Device = None) -> tuple[int, int]:
        memory = self._memory(device)
        return memory.size - memory.reserved, memory.size

    def _cudart(self) -> SimpleNamespace:
        def register(start: int, size: int, flags: int = 0) -> int:
            self.pinned.register(start, size)
            return 0

        def unregister(start: int) -> int:
            self.pinned.unregister(start)
            return 0

        return SimpleNamespace(
            cudaHostRegister=register,
            cudaHostUnregister=unregister,
            cudaError=SimpleNamespace(success=0),
            cudaGetErrorString=lambda code: f"error {code}",
        )

    def _at(self, address: int, size: int) -> Tensor:
        """The bytes at an address of a device, of whichever tensor."""
        for index, memory in enumerate(self.memory):
            offset = address - memory.address
            if offset >= 0 and offset + size <= memory.size:
                storage = _Borrowed(self, index, offset)
                return DeviceTensor(storage, torch.empty(size, dtype=torch.uint8, device="meta"))
        raise RuntimeError(f"{address:#x} is no address of a CUDA device")

    def _replace(self, owner: Any, name: str, new: Any) -> None:
        own = name in vars(owner)
        old = vars(owner)[name] if own else None
        setattr(owner, name, new)
        self._undo.append(lambda: setattr(owner, name, old) if own else delattr(owner, name))


class _Borrowed(DeviceStorage):
    """Memory that somebody else owns."""

    __slots__ = ()

    def __init__(self, cuda: FakeCuda, index: int, offset: int) -> None:
        self.cuda = cuda
        self.index = index
        self.block = SimpleNamespace(offset=offset, used_by=set())  # type: ignore[assignment]

    def __del__(self) -> None:
        pass


def _check_error(code: int) -> None:
    if code:
        raise torch.cuda.CudaError(code)


def _pinning(plain: Callable[..., Tensor], pinned: PinnedMemory) -> Callable[..., Tensor]:
    """A function that makes tensors, with ``pin_memory``."""

    def make(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        tensor = plain(*args, **kwargs)
        return pinned.copy_of(tensor) if pin_memory else tensor

    return make
