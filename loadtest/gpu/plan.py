"""The parts, in the order in which they run, each with its time limit and the call that it belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

CALL_SECONDS = 530
"""The most seconds of one call: less than nine minutes."""
LEAST_SECONDS = 10
"""The seconds that must be left of a call for another part to begin."""


@dataclass(frozen=True)
class Part:
    """One part: ``measure`` of a module in ``loadtest.gpu.parts``, in a process of its own."""

    name: str
    module: str
    limit: float
    """The seconds after which it is ended."""
    calls: tuple[int, ...]
    argument: str = ""
    """The word that the module is called with."""
    environment: Mapping[str, str] = field(default_factory=dict)


UCX = MappingProxyType({"UCX_PROTO_INFO": "y", "UCX_LOG_LEVEL": "info"})
"""The environment in which UCX says how it moves what."""
NCCL = MappingProxyType({"NCCL_DEBUG": "INFO"})

PARTS = (
    Part("versions", "versions", 40, (1, 2)),
    Part("builds", "builds", 120, (1, 2)),
    Part("kernel-tests", "suites", 120, (1,), "kernels"),
    Part("decode", "step", 90, (1,), "decode"),
    Part("prompt", "step", 60, (1,), "prompt"),
    Part("profile", "profiling", 75, (1,)),
    Part("attention", "attention", 75, (1,)),
    Part("experts", "experts", 60, (2,)),
    Part("offline", "offline", 130, (1,)),
    Part("correctness", "correctness", 60, (1,), environment={"BATON_CPU_KERNELS": "plain"}),
    Part("sanitizer", "suites", 75, (1,), "sanitizer"),
    Part("cuda-tests", "suites", 150, (2,), "cuda"),
    Part("serve", "serve", 120, (2,)),
    Part("handoff-tcp", "handoff", 75, (2,), "tcp"),
    Part("handoff-ucx", "handoff", 75, (2,), "ucx", UCX),
    Part("handoff-nixl", "handoff", 75, (2,), "nixl", UCX),
    Part("disturbance", "disturbance", 75, (2,)),
    Part("quantized", "quantized", 60, (2,)),
    Part("speculative", "speculative", 60, (2,)),
    Part("host-tier", "host_tier", 60, (2,)),
    Part("long-context", "long_context", 75, (2,)),
    Part("handoff-nccl", "handoff", 60, (2,), "nccl", NCCL),
)
ON_REQUEST = (Part("experts-beside-torch", "experts", 60, (), "grouped_mm"),)
"""Parts that run when they are asked for by name."""
REHEARSALS = (
    Part("rehearsal-raises", "rehearsals", 20, (), "raises"),
    Part("rehearsal-sleeps", "rehearsals", 12, (), "sleeps"),
)
"""Parts that fail on purpose. They run when they are asked for by name."""
BY_NAME: Mapping[str, Part] = MappingProxyType(
    {part.name: part for part in (*PARTS, *ON_REQUEST, *REHEARSALS)}
)


def of_call(call: int | None) -> list[Part]:
    """Return the parts of one call, or of both."""
    return [part for part in PARTS if call is None or call in part.calls]
