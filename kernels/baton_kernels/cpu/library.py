"""The Python interface of the built library. Pointers are ``Tensor.data_ptr()``; calls let other threads
run."""

from __future__ import annotations

import ctypes
import functools
import logging
import os

import torch
from torch import Tensor

from baton_kernels.cpu.build import BuildError, library

log = logging.getLogger(__name__)

KINDS = {torch.float32: 0, torch.bfloat16: 1}
SWITCH = "BATON_CPU_KERNELS"
CHOICES = ("auto", "native", "plain")

_I, _L, _F, _P = ctypes.c_int, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
_SIGNATURES = {
    "baton_release_threads": (),
    "baton_bind_threads": (_P, _I),
    "baton_advise": (_P, _L),
    "baton_give_back": (_P, _L),
    "baton_trim": (),
    "baton_pack": (_I, _P, _L, _L, _I, _P, _I),
    "baton_pack_codes": (_I, _P, _L, _L, _I, _P, _I),
    "baton_packed_rows": (_P, _L, _P, _L, _P),
    "baton_linear": (_I, _I, _P, _P, _L, _P, _I),
    "baton_route": (_P, _P, _L, _P, _P, _I),
    "baton_experts_memory": (_I, _P, _L),
    "baton_experts": (_I, _P, _P, _P, _P, _P, _L, _L, _I, _P, _I),
    "baton_add_norm": (_I, _I, _P, _P, _P, _P, _F, _L, _L, _P, _I),
    "baton_squares_of_heads": (_I, _P, _L, _L, _L, _L, _P, _I),
    "baton_scale_heads": (_I, _P, _P, _P, _L, _L, _L, _F, _F, _L, _P, _P, _I),
    "baton_rotate_and_store": (
        *(_I, _I, _P, _P, _L, _P, _P, _P, _P, _P, _P, _F, _F, _P, _P, _L, _L, _F, _F, _I),
    ),
    "baton_decode": (_I, _I, _P, _P, _L, _P, _P, _P, _P, _L, _L, _L, _F, _F, _F, _L, _P, _I),
    "baton_prefill": (_I, _I, _P, _P, _L, _P, _P, _P, _L, _L, _L, _F, _F, _F, _L, _P, _I),
    "baton_delta": (_I, _P, _P, _I),
    "baton_attend_latents": (_I, _P, _P, _L, _P, _P, _P, _P, _L, _L, _L, _L, _F, _I),
    "baton_store_latents": (_I, _P, _P, _L, _P, _P, _P, _P, _P, _P, _P, _L, _L, _L, _L, _I),
    "baton_absorb": (_I, _P, _P, _P, _P, _P, _P, _L, _L, _L, _L, _L, _L, _I),
    "baton_make_values": (_I, _P, _P, _P, _L, _L, _L, _L, _L, _I),
    "baton_layers": (_I, _I, _P, _L, _P, _I),
    "baton_short_conv_decode": (_P, _P, _P, _P, _P, _I),
    "baton_short_conv_prefill": (_P, _P, _P, _P, _L, _L, _P, _P, _I),
    "baton_mamba_decode": (_P, _P, _P, _P, _P, _P, _I),
    "baton_mamba_memory": (_P, _L, _I),
    "baton_mamba_prefill": (_P, _P, _P, _P, _L, _P, _P, _I),
    "baton_gated_norm": (_I, _P, _P, _P, _L, _L, _L, _P, _I),
}


class Native:
    """The kernels, one attribute each."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.release_threads = library.baton_release_threads
        self.bind_threads = library.baton_bind_threads
        self.advise = library.baton_advise
        self.give_back = library.baton_give_back
        self.trim = library.baton_trim
        self.pack = library.baton_pack
        self.pack_codes = library.baton_pack_codes
        self.packed_rows = library.baton_packed_rows
        self.linear = library.baton_linear
        self.route = library.baton_route
        self.experts_memory = library.baton_experts_memory
        self.experts = library.baton_experts
        self.add_norm = library.baton_add_norm
        self.squares_of_heads = library.baton_squares_of_heads
        self.scale_heads = library.baton_scale_heads
        self.rotate_and_store = library.baton_rotate_and_store
        self.decode = library.baton_decode
        self.prefill = library.baton_prefill
        self.delta = library.baton_delta
        self.attend_latents = library.baton_attend_latents
        self.store_latents = library.baton_store_latents
        self.absorb = library.baton_absorb
        self.make_values = library.baton_make_values
        self.layers = library.baton_layers
        self.short_conv_decode = library.baton_short_conv_decode
        self.short_conv_prefill = library.baton_short_conv_prefill
        self.mamba_decode = library.baton_mamba_decode
        self.mamba_memory = library.baton_mamba_memory
        self.mamba_prefill = library.baton_mamba_prefill
        self.gated_norm = library.baton_gated_norm
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
        self.experts_memory.restype = self.mamba_memory.restype = _L


@functools.cache
def native() -> Native | None:
    """The kernels, built at the first call. None: plain torch computes on CPUs, as
    ``BATON_CPU_KERNELS=plain`` wants, or because (with ``auto``, the default) there is no compiler, which is
    logged.

    Raises ValueError if ``BATON_CPU_KERNELS`` is ``native`` and the kernels cannot be built, or if its value
    is unknown.
    """
    wanted = os.environ.get(SWITCH, "auto")
    if wanted not in CHOICES:
        raise ValueError(f"{SWITCH} is {wanted!r}; allowed: {', '.join(CHOICES)}")
    if wanted == "plain":
        return None
    try:
        return Native(ctypes.CDLL(str(library())))
    except (BuildError, OSError) as error:
        if wanted == "native":
            raise ValueError(f"{SWITCH} is native, but the kernels cannot be built: {error}") from error
        log.warning(
            "the CPU kernels cannot be built: %s. Plain torch computes, several times slower; %s=plain says "
            "that this is meant",
            error,
            SWITCH,
        )
        return None


def pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def release_threads() -> None:
    """Ends the threads that have computed for the calling thread. To be called where another thread takes
    over.

    With the threads of both there are more threads than cores. OpenMP then puts threads to sleep between any
    two kernels, instead of letting them wait for the next one awake."""
    kernels = native()
    if kernels is not None:
        kernels.release_threads()


def bind_threads() -> bool:
    """Gives each thread that computes for the calling thread, itself included, a core of its own, if there
    are as many threads as this process may use cores; with fewer, other processes may want these cores as
    much. To be called on a thread that does nothing else: threads that it starts are bound like it. True if
    the threads are bound.

    Two threads on one core wait for each other at the end of every kernel, for a slice of time each. The
    system puts them there when other processes wake, and leaves them there for long."""
    kernels, cores = native(), sorted(os.sched_getaffinity(0))
    threads = torch.get_num_threads()
    if kernels is None or threads == 1 or threads != len(cores):
        return False
    kernels.bind_threads((ctypes.c_int * threads)(*cores), threads)
    return True


def advise_large_pages(tensor: Tensor) -> None:
    """Asks the system for large pages under memory that is not written yet: reads from all over it then miss
    the processor's page tables less often."""
    kernels = native()
    if kernels is not None:
        kernels.advise(tensor.data_ptr(), tensor.nbytes)


def give_back_free_memory() -> None:
    """Gives the memory that was allocated and is free back to the system, which else has to wait for it until
    somebody needs it again."""
    kernels = native()
    if kernels is not None:
        kernels.trim()
