"""What a worker's options would make of a checkpoint, without loading it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from baton import hub
from baton.engine.capacity import DeviceMemory, KVCapacity, capacity_of
from baton.engine.config import EngineConfig, EngineSettings
from baton.engine.device import choose_device, choose_dtype, device_memory, machine_memory
from baton.models.inspection import Inspection, inspect_checkpoint
from baton.models.loader import kv_dtype, kv_scale_bytes
from baton.process.options import ConfigError
from baton.worker.config import WorkerConfig


@dataclass(frozen=True, slots=True)
class CheckedCheckpoint:
    """A checkpoint, and the memory that a worker would have for it."""

    path: Path
    inspection: Inspection
    where: str
    """The device, for a person."""
    memory: DeviceMemory
    block_size: int
    capacity: KVCapacity
    holds: bool
    """Whether the memory holds a sequence of the length that was asked for, if any, and of one token."""

    @property
    def is_fine(self) -> bool:
        """Whether a worker can load and serve it."""
        return self.holds and not self.inspection.problems


def check_checkpoint(
    config: WorkerConfig,
    gpu_memory: int | None = None,
    fraction: float | None = None,
    length: int | None = None,
) -> CheckedCheckpoint:
    """Check the model that a worker's options name; of a hub id, what the local cache has.

    ``gpu_memory``: bytes of each GPU that is meant instead of this machine's; ``fraction``: the share of it
    that a worker uses, None: its default; ``length``: tokens of the sequences that are counted, None: the
    longest. ModelError or ValueError, one line, for what keeps the model from being served."""
    path = hub.resolve_model(config.model, fetch=False)
    device = choose_device(config.device) if gpu_memory is None else "cuda"
    on_device = device_memory(device) if gpu_memory is None else gpu_memory
    settings = config.engine_settings() | {
        "dtype": choose_dtype(config.dtype, device, path),
        "device": device,
        "device_bytes": on_device,
    }
    if fraction is not None:
        settings["device_memory_fraction"] = fraction
    engine = EngineConfig(path, **settings)
    inspection = inspect_checkpoint(
        path,
        engine.dtype,
        engine.quantization,
        engine.tensor_parallel_size,
        engine.pipeline_parallel_size,
    )
    most = engine.limits(inspection.config.max_model_len).max_model_len
    if length is not None and not 1 <= length <= most:
        raise ConfigError("length", f"must be 1 to {most}, the longest sequence, not {length}")
    memory, size = _memory(engine, on_device), engine.sizes.block_size
    kind = torch.device(device).type
    kept = kv_dtype(engine.kv_cache_dtype, inspection.config, inspection.dtype, kind)
    capacity = capacity_of(
        inspection, memory, size, length or most, kept, kv_scale_bytes(engine.kv_cache_dtype)
    )
    where = f"{'this machine' if gpu_memory is None else 'a GPU'} ({device})"
    holds = capacity.longest >= (length or 1)
    return CheckedCheckpoint(path, inspection, where, memory, size, capacity, holds)


def _memory(engine: EngineSettings, on_device: int) -> DeviceMemory:
    """The memory for weights and KV: of each device, or of this machine, which CPUs have in common."""
    if on_device:
        return DeviceMemory(on_device, engine.device_memory_fraction, kv_bytes=engine.kv_cache_bytes)
    return DeviceMemory(machine_memory(), is_shared=True, kv_bytes=engine.kv_cache_bytes)
