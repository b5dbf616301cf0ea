"""A count of the kernels that triton compiles. A launch that compiles one stops its caller for a second."""

from __future__ import annotations

import threading

from triton import knobs


class Compilations:
    """Counts from when it is made: also kernels that triton finds compiled on disk, which takes less time."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()
        self._before = knobs.runtime.jit_post_compile_hook
        knobs.runtime.jit_post_compile_hook = self._compiled

    def _compiled(self, **of_kernel: object) -> bool | None:
        """Triton's hook. It is one for the whole process, so one that was there is called as well."""
        with self._lock:
            self.count += 1
        if self._before is None:
            return None
        told: bool | None = self._before(**of_kernel)
        return told
