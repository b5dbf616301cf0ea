"""How one simulated worker is set up."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from baton.options import ConfigError, check_range
from baton.simulated.faults import FaultOptions
from baton.simulated.profile import Profile
from baton.worker.config import WorkerConfig

DEFAULT_BLOCKS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedConfig:
    """``worker`` holds what it has in common with a real one: role, addresses, sizes, limits. Its connector
    is tcp. Raises ConfigError for what a simulation does not have."""

    worker: WorkerConfig
    profile: Profile = field(default_factory=Profile)
    faults: FaultOptions = field(default_factory=FaultOptions)
    revision: str | None = None
    """None: that of the model's files. Each computes KV and tokens of its own."""
    http_port: int = -1
    """Of the plain OpenAI API that it serves beside; -1: none, 0: any."""
    record: Path | None = None

    def __post_init__(self) -> None:
        check_range("http_port", self.http_port, -1, 65535)
        worker = self.worker
        if worker.connector not in ("auto", "tcp"):
            raise ConfigError("connector", f"must be auto or tcp in a simulation, not {worker.connector}")
        if worker.world > 1:
            raise ConfigError("tensor_parallel_size", "a simulated worker is one process")
        if worker.speculative_method != "none":
            raise ConfigError("speculative_method", "a simulated worker drafts nothing")
        if worker.host_kv_memory:
            raise ConfigError("host_kv_memory", "a simulated worker has no host tier")
