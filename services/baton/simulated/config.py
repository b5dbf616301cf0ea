"""How one simulated worker is set up."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from baton.engine.defaults import StepSizes
from baton.process.fields import Option, check_options
from baton.process.options import ConfigError
from baton.simulated.faults import FaultOptions
from baton.simulated.profile import Profile
from baton.worker.config import WorkerConfig

DEFAULT_BLOCKS = 4096
SIZES = StepSizes(block_size=16, max_num_seqs=256, max_num_batched_tokens=2048, prefill_chunk=2048)
"""The sizes where the options leave them open, whatever device is simulated."""
SIMULATION = "Simulation"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedConfig:
    """``worker`` holds what it has in common with a real one: role, addresses, sizes, limits. Its connector
    is tcp. Raises ConfigError for what a simulation does not have."""

    worker: WorkerConfig
    profile: Profile = field(default_factory=Profile)
    faults: FaultOptions = field(default_factory=FaultOptions)
    revision: Annotated[
        str | None, Option("What it says is its model's. Default: the files' own.", SIMULATION)
    ] = None
    """Each computes KV and tokens of its own."""
    http_port: Annotated[
        int,
        Option(
            "Serve a plain OpenAI API beside, for other routers; 0: any port, -1: none.",
            SIMULATION,
            least=-1,
            most=65535,
        ),
    ] = -1
    record: Annotated[
        Path | None, Option("Write down when each token was there, for measurements.", SIMULATION)
    ] = None

    def __post_init__(self) -> None:
        check_options(self)
        worker = self.worker
        if worker.connector not in ("auto", "tcp"):
            raise ConfigError("connector", f"must be auto or tcp in a simulation, not {worker.connector}")
        if worker.world > 1:
            raise ConfigError("tensor_parallel_size", "a simulated worker is one process")
        if worker.speculative_method != "none":
            raise ConfigError("speculative_method", "a simulated worker drafts nothing")
        if worker.host_kv_memory:
            raise ConfigError("host_kv_memory", "a simulated worker has no host tier")
