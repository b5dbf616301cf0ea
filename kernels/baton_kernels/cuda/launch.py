"""Launches of a kernel for which triton looks up once what it compiled, and not at every launch.

Outside of a CUDA graph a step launches some two hundred kernels, and triton takes 15 to 30 us of the host for
each: it binds the arguments by name, asks every one what it would specialize a kernel for, and makes text of
the answers. :class:`BoundKernel` asks few questions that have the same answers: the types, the numbers that
a kernel is specialized for, and whether all pointers are aligned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, Protocol

from torch import Tensor
from triton import JITFunction, knobs
from triton.runtime import driver

Grid = tuple[int, ...]


class Launch(Protocol):
    """A kernel with its grid: pointers first, then numbers, then the constants and options by name."""

    def __call__(self, *args: Tensor | float, **constants: Any) -> object: ...


class BoundKernel:
    """A kernel of triton, launched as ``kernel[grid](*tensors, *numbers, **constants)``.

    The launch goes to the current device, to which the tensors must belong. The first launch of its kind is
    triton's own, and so is every one while triton interprets, while someone listens to launches (a profiler),
    and with tensors that do not begin at a multiple of 16 bytes though the kernel is specialized for it.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._bound: dict[object, Callable[..., None]] = {}
        self._arguments: _Arguments | None = None

    def __getitem__(self, grid: Grid) -> Launch:
        if not isinstance(self.kernel, JITFunction):  # the interpreter
            launch: Launch = self.kernel[grid]
            return launch
        return partial(self._launch, grid)

    def _launch(self, grid: Grid, *args: Any, **constants: Any) -> object:
        arguments = self._arguments
        if arguments is None:
            arguments = self._arguments = _Arguments.of(self.kernel, args)
        tensors, numbers = args[: arguments.tensors], args[arguments.tensors :]
        pointers = [*map(_data_ptr, tensors)]
        device = driver.active.get_current_device()
        names = (*constants,)
        kind = (device, names, *map(_dtype, tensors), *arguments.fixed(args), *constants.values())
        bound = self._bound.get(kind)
        alike = arguments.alike(pointers, args)
        if bound is None or not alike:
            return self._bind(grid, args, constants, kind, alike)
        if knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls:
            return self.kernel[grid](*args, **constants)
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        return bound(x, y, z, driver.active.get_current_stream(device), pointers, numbers)

    def _bind(
        self, grid: Grid, args: tuple[Any, ...], constants: dict[str, Any], kind: object, alike: bool
    ) -> object:
        """Launches as triton does, and keeps what it launched if it is right for all launches of a kind."""
        compiled = self.kernel[grid](*args, **constants)
        if compiled is not None and alike:
            named = [constants[param.name] for param in self.kernel.params[len(args) :]]
            self._bound[kind] = _launcher(compiled, named)
        return compiled


@dataclass(frozen=True, slots=True)
class _Arguments:
    """The kinds of arguments of a kernel."""

    tensors: int
    """Leading arguments that are tensors."""
    aligned: tuple[int, ...]
    """The tensors for whose alignment the kernel is specialized."""
    fixed: Callable[[tuple[Any, ...]], Iterable[float]]
    """The numbers for which it is specialized, of all arguments."""
    free: tuple[int, ...]
    """All other numbers."""

    @classmethod
    def of(cls, kernel: Any, args: tuple[Any, ...]) -> _Arguments:
        is_tensor = [isinstance(arg, Tensor) for arg in args]
        count = sum(is_tensor)
        if not all(is_tensor[:count]):
            raise TypeError(f"{kernel.fn.__name__}: tensors must come before numbers")
        numbers = range(count, len(args))
        fixed = [at for at in numbers if not kernel.params[at].do_not_specialize]
        return cls(
            tensors=count,
            aligned=tuple(at for at in range(count) if not kernel.params[at].do_not_specialize_on_alignment),
            # Two, or itemgetter makes no tuple.
            fixed=itemgetter(*fixed, *fixed[:1]) if fixed else lambda _: (),
            free=tuple(at for at in numbers if kernel.params[at].do_not_specialize),
        )

    def alike(self, pointers: Sequence[int], args: tuple[Any, ...]) -> bool:
        """Whether all is aligned that should be, and every other number has 32 bits."""
        bits = 0
        for at in self.aligned:
            bits |= pointers[at]
        if bits % 16:
            return False
        return all(-(2**31) <= args[at] < 2**31 for at in self.free)


_data_ptr = Tensor.data_ptr
_dtype = attrgetter("dtype")


def bound(kernel: Any) -> BoundKernel:
    """Decorates a kernel of triton, above ``triton.jit``."""
    return BoundKernel(kernel)


def _launcher(compiled: Any, constants: list[object]) -> Callable[..., None]:
    """A function that launches ``compiled`` with triton's own launcher."""
    run, function, packed = compiled.run, compiled.function, compiled.packed_metadata

    def launch(x: int, y: int, z: int, stream: int, pointers: list[int], numbers: tuple[float, ...]) -> None:
        # Its hooks are None: nobody listens. An address is taken as it is, and not asked for its context.
        run(x, y, z, stream, function, packed, None, None, None, *pointers, *numbers, *constants)

    return launch
