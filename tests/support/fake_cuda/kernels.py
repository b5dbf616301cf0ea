"""Launches of Triton kernels on a fake device: triton's interpreter runs them, when their stream does.

As on the device, every address that a kernel reads or writes is checked: it must be the device's own memory,
or pinned memory of the host.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from triton.runtime import interpreter

from tests.support.fake_cuda.streams import cuda_error
from tests.support.fake_cuda.tensors import DeviceTensor, mapped, tensors_in

if TYPE_CHECKING:
    from tests.support.fake_cuda.device import FakeCuda


class KernelLauncher:
    """What stands in for the launches of triton's interpreter."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self._undo: list[Callable[[], None]] = []
        self._running = threading.local()
        """Whether this thread runs a kernel on device memory."""

    def install(self) -> None:
        launcher, cuda, plain = self, self._cuda, interpreter.InterpretedFunction.run

        class Executor(interpreter.GridExecutor):  # type: ignore[misc]
            """Takes tensors as they are: they need no way to the host and back."""

            def _init_args_hst(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
                return args, kwargs

            def _restore_args_dev(self, *_: object) -> None:
                pass

        def run(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            if warmup or not any(isinstance(t, DeviceTensor) for t in tensors_in(args, kwargs)):
                plain(function, *args, grid=grid, warmup=warmup, **kwargs)
                return
            name, index = function.fn.__name__, cuda.current_device()
            real, named = (
                mapped(value, lambda t: cuda.kernel_argument(t, index, name)) for value in (args, kwargs)
            )
            executor = Executor(function.rewrite(), function.arg_names, grid, function.pre_run_hooks)
            queue = cuda.current_queue(index)
            cuda.timeline.issue(queue, "kernel", name, lambda: self._run(executor, real, named))

        self._replace(interpreter.InterpretedFunction, "run", run)
        builder = interpreter.InterpreterBuilder
        load, store = builder.create_masked_load, builder.create_masked_store

        def checked_load(
            self: Any, ptrs: Any, mask: Any, other: Any, cache_policy: Any, is_volatile: Any
        ) -> Any:
            launcher._check(ptrs.data, mask.data)
            return load(self, ptrs, mask, other, cache_policy, is_volatile)

        def checked_store(self: Any, ptrs: Any, value: Any, mask: Any, cache_policy: Any) -> Any:
            launcher._check(ptrs.data, mask.data)
            return store(self, ptrs, value, mask, cache_policy)

        self._replace(builder, "create_masked_load", checked_load)
        self._replace(builder, "create_masked_store", checked_store)

    def uninstall(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _replace(self, owner: Any, name: str, new: Any) -> None:
        old = getattr(owner, name)
        setattr(owner, name, new)
        self._undo.append(lambda: setattr(owner, name, old))

    def _run(self, executor: Callable[..., None], args: Any, kwargs: Any) -> None:
        self._running.here = True
        try:
            executor(*args, **kwargs)
        finally:
            self._running.here = False

    def _check(self, addresses: Any, mask: Any) -> None:
        """AcceleratorError for an address that the device has no memory at."""
        if not getattr(self._running, "here", False):
            return
        used = addresses if np.all(mask) else addresses[np.broadcast_to(mask, addresses.shape)]
        if not used.size:
            return
        first, last = int(used.min()), int(used.max())
        for memory in self._cuda.memory:
            if memory.start <= first and last < memory.start + memory.size:
                return
        if not self._cuda.pinned.covers(first, last):
            raise cuda_error("an illegal memory access was encountered", f"{first:#x} to {last:#x}")
