"""An allocator of a device, simulated on a CPU: it counts the tensors that are made and let go."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class DeviceMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors while it is active. ``used``: bytes that are used from the start."""

    def __init__(self, total: int, used: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = total
        self.live = self.peak = used
        self._known: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        size = storage.nbytes()
        self._known[storage] = size
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.live -= size

    def reset_peak(self, *_: Any) -> None:
        self.peak = self.live

    @contextmanager
    def as_cuda(self) -> Iterator[None]:
        """What torch says of a CUDA device's memory is this one's."""
        told: dict[str, Any] = {
            "max_memory_allocated": lambda *_: self.peak,
            "memory_reserved": lambda *_: self.live,
            "mem_get_info": lambda *_: (self.total - self.live, self.total),
            "reset_peak_memory_stats": self.reset_peak,
            "empty_cache": lambda: None,
            "synchronize": lambda *_: None,
        }
        with patch.multiple(torch.cuda, **told), self:
            yield
