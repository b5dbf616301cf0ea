"""Tensors in the memory of a fake device: the host knows their shape, and only the device their numbers.

Each has a twin on torch's ``meta`` device, of the same storage as the twins of its views. An operation is run
on the twins first. It tells which results are views (which are made at once, as on any device) and which are
new; the numbers follow when the stream runs the operation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from tests.support.fake_cuda.memory import GARBAGE, Block
from tests.support.fake_cuda.streams import cuda_error

if TYPE_CHECKING:
    from tests.support.fake_cuda.device import FakeCuda
    from tests.support.fake_cuda.runtime import Stream

T = TypeVar("T")
Operation = Any  # torch._ops.OpOverload: its attributes are made at run time

NEED_THE_NUMBERS = frozenset(
    f"aten::{name}"
    for name in (
        *("_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "bincount", "repeat_interleave"),
        *("nonzero", "nonzero_numpy", "argwhere", "masked_select"),
        *("unique", "unique_consecutive", "unique_dim", "_unique", "_unique2"),
    )
)
"""Operations whose results' shape depends on numbers, or that give a number to the host: CUDA waits for the
device in them."""
INDEX = frozenset(
    f"aten::{name}"
    for name in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put")
)
"""Operations that take indices from the host too."""


EMPTY = frozenset(f"aten::{name}" for name in ("empty_like", "new_empty", "new_empty_strided"))
"""Operations that only allocate."""


class DeviceStorage:
    """Owns a block of device memory."""

    __slots__ = ("__weakref__", "block", "cuda", "index")

    def __init__(self, cuda: FakeCuda, index: int, block: Block) -> None:
        self.cuda = cuda
        self.index = index
        """The device's."""
        self.block = block

    def __del__(self) -> None:
        self.cuda.memory[self.index].drop(self.block)


class DeviceTensor(torch.Tensor):
    """A tensor in device memory. What would read that memory from the host raises what CUDA raises."""

    storage_: DeviceStorage
    twin: Tensor
    """The tensor's shape and strides, on the ``meta`` device."""
    content: Tensor
    """The tensor's numbers. Only work that a stream runs may touch them."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, storage: DeviceStorage, twin: Tensor) -> DeviceTensor:
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            twin.size(),
            strides=twin.stride(),
            storage_offset=twin.storage_offset(),
            dtype=twin.dtype,
            device=torch.device("cuda", storage.index),
        )
        made.storage_ = storage
        made.twin = twin
        made.content = storage.cuda.real(storage, twin)
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Operation, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return dispatch(func, tuple(args), dict(kwargs or {}))

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype}, {self.device})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, **_: object) -> Any:
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor "
            "to host memory first."
        )

    def __array__(self, *_: object, **__: object) -> Any:
        return self.numpy()

    def data_ptr(self) -> int:
        """The address on the device: the host has nothing there."""
        memory = self.storage_.cuda.memory[self.storage_.index]
        return memory.address + self.content.data_ptr() - memory.start

    def is_pinned(self, *_: object) -> bool:
        return False

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        self.storage_.block.used_by.add(stream.queue)


def allocate(cuda: FakeCuda, index: int, twin: Tensor) -> DeviceTensor:
    """A tensor of device ``index`` in new memory, which holds garbage. ``twin`` is new too."""
    queue = cuda.current_queue(index)
    size = twin.untyped_storage().nbytes()
    memory = cuda.memory[index]
    pool = queue.capture.pool if queue.capture is not None else None
    block = memory.allocate(size, queue, pool)
    tensor = DeviceTensor(DeviceStorage(cuda, index, block), twin)
    if cuda.garbage:
        span = memory.bytes[block.offset : block.offset + block.size].view(torch.int16)
        cuda.timeline.issue(queue, "garbage", "", lambda: span.fill_(GARBAGE))
    return tensor


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """``value``, with each tensor in it changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        parts = [mapped(part, change) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    if isinstance(value, dict):
        return {name: mapped(part, change) for name, part in value.items()}
    return value


def tensors_in(*values: Any) -> list[Tensor]:
    found: list[Tensor] = []
    mapped(values, found.append)
    return found


def dispatch(func: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation in which a device tensor takes part."""
    name = func._schema.name
    if name in ("aten::to", "aten::_to_copy"):
        return move(func, args, kwargs)
    if name == "aten::copy_":
        return copy(*args, **kwargs)
    if name == "aten::set_" or name.startswith("aten::resize"):
        raise NotImplementedError(f"{func}: a fake device tensor keeps its memory and its shape")
    if name in ("aten::is_pinned", "aten::_pin_memory", "aten::pin_memory"):
        raise cuda_error("only dense CPU tensors can be pinned")
    return Launch(func, args, kwargs).result()


class Launch:
    """One operation of a stream."""

    def __init__(self, func: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._func = func
        self._args = args
        self._kwargs = kwargs
        there = [t for t in tensors_in(args, kwargs) if isinstance(t, DeviceTensor)]
        storage = there[0].storage_
        self._cuda = storage.cuda
        self._index = storage.index
        self._queue = self._cuda.current_queue(self._index)
        self._twins: dict[int, DeviceTensor] = {id(t.twin): t for t in there}
        self._storages = {t.twin.untyped_storage()._cdata: t.storage_ for t in there}
        self._tracked = any(not t.is_inference() for t in there)
        """Whether views must be what they are outside of inference mode: those of such tensors are, in it."""
        for tensor in tensors_in(args, kwargs):
            self._check(tensor)

    def _check(self, tensor: Tensor) -> None:
        if isinstance(tensor, DeviceTensor):
            if tensor.storage_.index != self._index:
                raise self._mixed(tensor)
        elif tensor.dim() and self._func._schema.name not in INDEX:
            raise self._mixed(tensor)

    def _mixed(self, tensor: Tensor) -> RuntimeError:
        return RuntimeError(
            f"Expected all tensors to be on the same device, but found cuda:{self._index} and "
            f"{tensor.device} ({self._func})"
        )

    def result(self) -> Any:
        name = self._func._schema.name
        if self._needs_the_numbers():
            return self._now()
        outputs = self._func(*mapped(self._args, _twin), **self._with_device("meta", _twin))
        fresh: list[DeviceTensor | None] = []
        made = mapped(outputs, lambda twin: self._wrapped(twin, fresh))
        if name in EMPTY:
            return made
        if any(tensor is not None for tensor in fresh) or self._func._schema.is_mutable:
            self._issue(fresh)
        return made

    def _needs_the_numbers(self) -> bool:
        name = self._func._schema.name
        if name in NEED_THE_NUMBERS:
            return True
        if name not in INDEX:
            return False
        indices = tensors_in(self._args[1])
        return any(index.dtype in (torch.bool, torch.uint8) for index in indices)

    def _with_device(self, device: str, change: Callable[[Tensor], Any]) -> dict[str, Any]:
        kwargs = dict(mapped(self._kwargs, change))
        if kwargs.get("device") is not None:
            wanted = torch.device(kwargs["device"])
            if wanted.type != "cuda":
                raise NotImplementedError(f"{self._func} with a result on {wanted}")
            kwargs["device"] = torch.device(device)
        kwargs.pop("pin_memory", None)
        return kwargs

    def _wrapped(self, twin: Tensor, fresh: list[DeviceTensor | None]) -> DeviceTensor:
        """The tensor of a twin that an operation yields. ``fresh`` gets it, if its numbers are yet to come;
        None, if it is a view."""
        known = self._twins.get(id(twin))
        if known is not None:
            fresh.append(None)
            return known
        storage = self._storages.get(twin.untyped_storage()._cdata)
        if storage is not None:
            fresh.append(None)
            with torch.inference_mode(torch.is_inference_mode_enabled() and not self._tracked):
                return DeviceTensor(storage, twin)
        tensor = allocate(self._cuda, self._index, twin)
        self._storages[twin.untyped_storage()._cdata] = tensor.storage_
        fresh.append(tensor)
        return tensor

    def _issue(self, fresh: list[DeviceTensor | None]) -> None:
        func, args, kwargs = self._func, *self._real()
        targets = [None if tensor is None else tensor.content for tensor in fresh]

        def run() -> None:
            for target, output in zip(targets, tensors_in(func(*args, **kwargs)), strict=True):
                if target is not None:
                    target.copy_(output)

        self._cuda.timeline.issue(self._queue, "operation", str(func), run)

    def _real(self) -> tuple[Any, dict[str, Any]]:
        """The arguments in device memory, and what comes from the host as it is now."""

        def real(tensor: Tensor) -> Tensor:
            if isinstance(tensor, DeviceTensor):
                return tensor.content
            if tensor.dim():  # an index from the host: copied before the launch, which waits
                self._cuda.timeline.finish_queue(self._queue, "copy of an index")
            return tensor.clone()

        return mapped(self._args, real), self._with_device("cpu", real)

    def _now(self) -> Any:
        """The result of an operation that the host waits for."""
        self._cuda.timeline.finish_queue(self._queue, f"{self._func}")
        outcome: list[Any] = []
        func, (args, kwargs) = self._func, self._real()
        work = self._cuda.timeline.issue(
            self._queue, "operation", str(func), lambda: outcome.append(func(*args, **kwargs))
        )
        self._cuda.timeline.finish(work, f"{self._func}")
        return mapped(outcome[0], self._from_real)

    def _from_real(self, real: Tensor) -> DeviceTensor:
        twin = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="meta")
        tensor = allocate(self._cuda, self._index, twin)
        target = tensor.content
        self._cuda.timeline.issue(self._queue, "operation", "result", lambda: target.copy_(real))
        return tensor


def _twin(tensor: Tensor) -> Tensor:
    """The twin of a tensor: of the host's too, which may be a number or an index."""
    return tensor.twin if isinstance(tensor, DeviceTensor) else tensor.to("meta")


def move(func: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """``Tensor.to`` of a device tensor, in all its forms."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    tensor: DeviceTensor = given["self"]
    other: Tensor | None = given.get("other")
    dtype = given.get("dtype") or (tensor if other is None else other).dtype
    device = torch.device(given.get("device") or (tensor if other is None else other).device)
    cuda, index = tensor.storage_.cuda, tensor.storage_.index
    there = cuda.index_of(device) if device.type == "cuda" else None
    if there == index:
        named = {"dtype": dtype, "memory_format": given.get("memory_format")}
        if func._schema.name == "aten::to":
            if dtype == tensor.dtype and not given.get("copy") and named["memory_format"] is None:
                return tensor
            named["memory_format"] = named["memory_format"] or torch.preserve_format
        return Launch(torch.ops.aten._to_copy.default, (tensor,), named).result()  # type: ignore[no-any-return]
    non_blocking = bool(given.get("non_blocking"))
    if tensor.dtype != dtype:
        tensor = Launch(torch.ops.aten._to_copy.default, (tensor,), {"dtype": dtype}).result()
    twin = torch.empty_like(tensor.twin)
    if there is not None:
        return copy(allocate(cuda, there, twin), tensor, non_blocking)
    # torch pins what it makes for a copy that nobody waits for.
    target = torch.empty_strided(twin.size(), twin.stride(), dtype=dtype, pin_memory=non_blocking)
    return copy(target, tensor, non_blocking)


def copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """``Tensor.copy_`` to a device, from it or between two."""
    if isinstance(target, DeviceTensor) and isinstance(source, DeviceTensor):
        if target.storage_.index == source.storage_.index:
            return Launch(torch.ops.aten.copy_.default, (target, source), {}).result()  # type: ignore[no-any-return]
        return _copy_to_peer(target, source)
    if isinstance(target, DeviceTensor):
        return _copy_in(target, source, non_blocking)
    assert isinstance(source, DeviceTensor)
    return _copy_out(target, source, non_blocking)


def _copy_in(target: DeviceTensor, source: Tensor, non_blocking: bool) -> DeviceTensor:
    cuda, queue = target.storage_.cuda, target.storage_.cuda.current_queue(target.storage_.index)
    real, like = target.content, (source.dtype, source.is_contiguous()) == (target.dtype, True)
    if like and cuda.pinned.holds(source):
        work = cuda.timeline.issue(queue, "copy", "in", lambda: real.copy_(source))
        if not non_blocking:
            cuda.timeline.finish(work, "copy in")
        return target
    # The driver copies pageable memory to a buffer of its own, once the stream has come there.
    cuda.timeline.finish_queue(queue, "copy in from pageable memory")
    taken = source.to(target.dtype, copy=True)
    work = cuda.timeline.issue(queue, "copy", "in", lambda: real.copy_(taken))
    if not non_blocking:
        cuda.timeline.finish(work, "copy in from pageable memory")
    return target


def _copy_out(target: Tensor, source: DeviceTensor, non_blocking: bool) -> Tensor:
    cuda, queue = source.storage_.cuda, source.storage_.cuda.current_queue(source.storage_.index)
    real, like = source.content, (source.dtype, target.is_contiguous()) == (target.dtype, True)
    pinned = like and cuda.pinned.holds(target)
    if not pinned:
        cuda.timeline.forbid_in_capture(queue, "copy out to pageable memory")
    work = cuda.timeline.issue(queue, "copy", "out", lambda: target.copy_(real))
    if not (pinned and non_blocking):
        cuda.timeline.finish(work, "copy out" if pinned else "copy out to pageable memory")
    return target


def _copy_to_peer(target: DeviceTensor, source: DeviceTensor) -> DeviceTensor:
    """Between devices: after what both streams have, and the target's stream waits for it."""
    cuda = source.storage_.cuda
    here, there = (cuda.current_queue(t.storage_.index) for t in (source, target))
    to, real = target.content, source.content
    before = cuda.timeline.mark(there)
    work = cuda.timeline.issue(here, "copy", "peer", lambda: to.copy_(real), before)
    cuda.timeline.issue(there, "mark", "", None, work)
    return target
