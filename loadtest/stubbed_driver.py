"""Triton's own launcher without a device: every call reaches a driver that does nothing.

Kernels are compiled for compute capability 9.0, loaded and launched as on a device, up to the call of the
driver; so the host's share of a launch can be measured, and what a kernel would get can be looked at.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from triton.runtime import driver

from loadtest.kernel_builds import AbsentDevice

MOST_PARAMETERS = 40
SOURCE = """
#include <stdint.h>
#include <string.h>
#define DOES_NOTHING(name) int name(void) { return 0; }
DOES_NOTHING(cuCtxGetDevice) DOES_NOTHING(cuCtxGetLimit) DOES_NOTHING(cuCtxSetCurrent)
DOES_NOTHING(cuCtxSetLimit) DOES_NOTHING(cuFuncSetAttribute) DOES_NOTHING(cuFuncSetCacheConfig)
DOES_NOTHING(cuModuleUnload) DOES_NOTHING(cuOccupancyMaxActiveClusters) DOES_NOTHING(cuStreamIsCapturing)
DOES_NOTHING(cuTensorMapEncodeTiled) DOES_NOTHING(cuTensorMapEncodeIm2col) DOES_NOTHING(cuInit)
DOES_NOTHING(cuPointerGetAttributes) DOES_NOTHING(cuDriverGetVersion)
int cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)1; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = 232448; return 0; }
int cuFuncGetAttribute(int *value, int attribute, void *function) { *value = 1024; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "an error"; return 0; }
int cuModuleLoadData(void **module, const void *image) { *module = (void *)1; return 0; }
int cuModuleGetFunction(void **f, void *module, const char *name) { *f = (void *)1; return 0; }
int cuPointerGetAttribute(void *data, int attribute, uint64_t pointer) {
  *(uint64_t *)data = pointer;
  return 0;
}
unsigned launches, watched, wide, grid[3];
uint64_t parameters[40];
typedef struct { unsigned x, y, z; } Size;
int cuLaunchKernelEx(const Size *config, void *function, void **params, void **extra) {
  launches++;
  grid[0] = config->x, grid[1] = config->y, grid[2] = config->z;
  for (unsigned i = 0; i < watched; i++) {
    memcpy(&parameters[i], params[i], i < wide ? 8 : 4);
  }
  return 0;
}
"""


@dataclass
class Stub:
    """The driver that does nothing, but remember the last launch."""

    library: ctypes.CDLL

    @property
    def launches(self) -> int:
        return ctypes.c_uint.in_dll(self.library, "launches").value

    @property
    def grid(self) -> tuple[int, ...]:
        return tuple((ctypes.c_uint * 3).in_dll(self.library, "grid"))

    def watch(self, pointers: int, numbers: int) -> None:
        """Remember this many parameters of each launch from now on."""
        ctypes.c_uint.in_dll(self.library, "watched").value = pointers + numbers
        ctypes.c_uint.in_dll(self.library, "wide").value = pointers

    @property
    def parameters(self) -> tuple[int, ...]:
        """The last launch's: addresses, then the bits of numbers of 32 bits."""
        return tuple((ctypes.c_uint64 * MOST_PARAMETERS).in_dll(self.library, "parameters"))


class StubbedDevice(AbsentDevice):
    """Triton's driver, for a device of compute capability 9.0 whose driver does nothing."""

    def __init__(self) -> None:
        super().__init__(90)
        from triton.backends.nvidia.driver import CudaLauncher, CudaUtils

        self.utils: Any = CudaUtils()
        self.launcher_cls = CudaLauncher

    def allocate_default_profile_scratch(self, size: int, alignment: int, stream: int) -> None:
        raise AssertionError(f"no kernel profiles itself, and none asks for {size} bytes")


@contextmanager
def stubbed() -> Iterator[Stub]:
    """Launch kernels up to the call of the driver within this context."""
    with TemporaryDirectory() as folder:
        source, library = Path(folder) / "stub.c", Path(folder) / "libcuda.so.1"
        source.write_text(SOURCE)
        named = f"-Wl,-soname,{library.name}"
        subprocess.run(["gcc", "-O2", "-shared", "-fPIC", named, source, "-o", library], check=True)
        # Loaded before triton asks for a library of that name, which then is this one.
        loaded = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        os.environ["TRITON_LIBCUDA_PATH"] = folder
        driver.set_active(StubbedDevice())
        try:
            yield Stub(loaded)
        finally:
            driver._active = None
            del os.environ["TRITON_LIBCUDA_PATH"]
