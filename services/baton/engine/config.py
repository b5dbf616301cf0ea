"""The engine's settings."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated

from baton.engine.defaults import CPU, StepSizes, defaults_of
from baton.engine.options import EngineOptions
from baton.engine.scheduler import SchedulerLimits
from baton.process.fields import Option, check_arguments
from baton.speculation.config import ONE_PROCESS, SpeculationConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings(EngineOptions):
    """All that an engine is told but the model. ValueError names the field, its value and what is allowed."""

    load_seed: int = 0
    """The seed of the random weights that ``load_format`` dummy makes."""
    kv_cache_bytes: Annotated[
        int | None,
        Option(
            "Default: 1 GiB on CPU; on CUDA what device_memory_fraction leaves beside weights.",
            least=1,
        ),
    ] = None
    """Memory of the KV pool, where ``num_blocks`` says nothing."""
    host_kv_bytes: int = 0
    """Host memory for blocks that the pool evicts, in bytes; 0: evicted blocks are not kept."""
    device_memory_fraction: float = 0.9
    priority_aging: float | None = None
    """The waiting time that is worth one level of priority, in seconds; None: first come, first served."""
    num_threads: Annotated[
        int | None, Option("Default: as torch chooses, or the cores shared out to the ranks.", least=1)
    ] = None
    """Threads of torch on the CPU, for the whole process, of each rank."""

    def __post_init__(self) -> None:
        check_arguments(self)
        _ = self.speculation
        if self.world > 1 and self.speculative_method in ONE_PROCESS:
            raise ValueError(
                f"speculative_method is {self.speculative_method!r}; allowed with "
                f"{self.world} ranks (tensor_parallel_size x pipeline_parallel_size): none, ngram, draft"
            )
        if self.async_scheduling == "on" and (self.world > 1 or self.speculative_method != "none"):
            raise ValueError(
                f"async_scheduling is 'on'; allowed with {self.world} ranks (tensor_parallel_size x "
                f"pipeline_parallel_size) and speculative_method {self.speculative_method!r}: auto, off"
            )
        if self.kv_cache_dtype == "fp8-dynamic" and self.speculative_method != "none":
            raise ValueError(  # a draft that is refused would have widened its block's scales
                f"kv_cache_dtype is 'fp8-dynamic'; allowed with speculative_method "
                f"{self.speculative_method!r}: auto, fp8"
            )
        if not 0 < self.device_memory_fraction <= 1:
            raise ValueError(
                f"device_memory_fraction is {self.device_memory_fraction}; allowed: above 0, at most 1"
            )
        if self.host_kv_bytes < 0:
            raise ValueError(f"host_kv_bytes is {self.host_kv_bytes}; allowed: 0 and more")
        if self.host_kv_bytes and not self.prefix_caching:
            raise ValueError(
                f"host_kv_bytes is {self.host_kv_bytes}; allowed: 0, as without prefix_caching nothing would "
                "be found there"
            )
        if self.priority_aging is not None and not 0 <= self.priority_aging < math.inf:
            raise ValueError(f"priority_aging is {self.priority_aging}; allowed: 0 and more, in seconds")
        if self.max_num_batched_tokens is not None and self.max_num_seqs is not None:
            self.sizes_with(CPU.sizes)  # refuses the two of them, whatever the device

    @property
    def speculation(self) -> SpeculationConfig:
        """The options of speculation. ValueError if they do not go together."""
        return SpeculationConfig(
            self.speculative_method,
            self.speculative_model,
            self.num_speculative_tokens,
            self.speculative_ngram_min,
            self.speculative_ngram_max,
        )


@dataclass(frozen=True, slots=True)
class EngineConfig(EngineSettings):
    """What to load and how much to run at once, with the model and the device found."""

    model: Path
    """A directory with config.json and safetensors."""
    device: str = field(default="cpu", kw_only=True)
    device_bytes: int = field(default=0, kw_only=True)
    """The device's memory, by which defaults are chosen; 0: unknown."""

    def __post_init__(self) -> None:
        EngineSettings.__post_init__(self)
        _ = self.sizes

    @property
    def sizes(self) -> StepSizes:
        """The sizes of blocks and steps: those that are given, and the device's defaults for the others."""
        return self.sizes_with(defaults_of(self.device, self.device_bytes).sizes)

    def described(self) -> str:
        """The sizes and where they come from, in a line for a person."""
        defaults, sizes = defaults_of(self.device, self.device_bytes), self.sizes
        memory = f" ({self.device_bytes / (1 << 30):.0f} GiB)" if self.device_bytes else ""
        given = [field.name for field in fields(StepSizes) if getattr(self, field.name) is not None]
        source = f"{', '.join(given)} as given, else " if given else ""
        return (
            f"{self.device}{memory}: blocks of {sizes.block_size} tokens, {sizes.max_num_seqs} sequences, "
            f"{sizes.max_num_batched_tokens} tokens a step, {sizes.prefill_chunk} of one prompt, "
            f"{self.mixed_prefill_tokens or 'as many'} beside running answers; {source}the defaults of "
            f"{defaults.name}, where {defaults.reason}"
        )

    def limits(self, model_max_len: int, longest_shared_prompt: int | None = None) -> SchedulerLimits:
        """The scheduler's limits, for a model whose context is ``model_max_len`` tokens."""
        if self.max_model_len is not None and self.max_model_len > model_max_len:
            raise ValueError(
                f"max_model_len is {self.max_model_len}; allowed: at most {model_max_len}, the model's"
            )
        sizes = self.sizes
        return SchedulerLimits(
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            prefill_chunk=sizes.prefill_chunk,
            max_model_len=self.max_model_len or model_max_len,
            chunked_prefill=self.chunked_prefill,
            prefix_caching=self.prefix_caching,
            longest_shared_prompt=longest_shared_prompt,
            priority_aging=self.priority_aging,
            mixed_prefill_tokens=self.mixed_prefill_tokens,
        )
