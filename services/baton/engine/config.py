"""The engine's settings."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import get_args

from baton.engine.scheduler import SchedulerLimits
from baton.models.config import DTYPES
from baton.models.loader import LoadFormat
from baton.models.quantization import QUANTIZATIONS, Quantization
from baton.speculation.config import Method, SpeculationConfig

_POSITIVE = (
    "block_size",
    "num_blocks",
    "kv_cache_bytes",
    "max_num_seqs",
    "max_num_batched_tokens",
    "prefill_chunk",
    "mixed_prefill_tokens",
    "max_model_len",
    "num_threads",
    "tensor_parallel_size",
    "pipeline_parallel_size",
)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What to load and how much to run at once. ValueError names the field, its value and what is allowed."""

    model: Path
    """A directory with config.json and safetensors."""
    dtype: str = "auto"
    """Of weights and KV: float32, bfloat16, float16; auto: the type the weights were saved in."""
    quantization: Quantization = "none"
    """int8: the weights of matmuls in half the memory; on a CPU with its kernels."""
    device: str = "cpu"
    load_format: LoadFormat = "auto"
    """dummy: random weights from ``load_seed``."""
    load_seed: int = 0
    block_size: int = 16
    """Tokens in a KV block."""
    num_blocks: int | None = None
    """Blocks in the KV pool; None: as many as ``kv_cache_bytes`` hold."""
    kv_cache_bytes: int | None = None
    """None: 1 GiB on CPU; on CUDA what ``device_memory_fraction`` leaves beside weights and activations."""
    host_kv_bytes: int = 0
    """Host memory for blocks that the pool evicts; 0: none are kept."""
    device_memory_fraction: float = 0.9
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    prefill_chunk: int = 256
    """Most tokens of one prompt in one step."""
    mixed_prefill_tokens: int | None = None
    """Most tokens of prompts in a step in which something decodes; None: as in any other."""
    chunked_prefill: bool = True
    """Off: a whole prompt in one step, even above ``max_num_batched_tokens``."""
    prefix_caching: bool = True
    max_model_len: int | None = None
    """Most tokens of prompt and outputs together; None: what the model allows."""
    priority_aging: float | None = None
    """Seconds of waiting that are worth one level of priority; None: first come, first served."""
    speculative_method: Method = "none"
    """Who drafts tokens ahead; the rest of these is explained in ``SpeculationConfig``."""
    speculative_model: str | None = None
    num_speculative_tokens: int = 4
    speculative_ngram_min: int = 2
    speculative_ngram_max: int = 4
    enforce_eager: bool = False
    """On CUDA, launch every kernel of a decode step by itself: no graphs (``baton.engine.graphs``)."""
    num_threads: int | None = None
    """Threads of torch on the CPU, for the whole process, of each rank; None: as torch chooses, or the cores
    shared out to the ranks."""
    tensor_parallel_size: int = 1
    """Ranks that share the heads and inner rows of every layer."""
    pipeline_parallel_size: int = 1
    """Stages that the layers are dealt out to. There are tensor x pipeline ranks, a process each; on CUDA
    they use as many devices, from ``device`` on."""

    def __post_init__(self) -> None:
        settings: dict[str, object] = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in _POSITIVE:
            value = settings[name]
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} is {value!r}; allowed: a whole number of at least 1")
        for name, allowed in (
            ("dtype", ("auto", *DTYPES)),
            ("quantization", QUANTIZATIONS),
            ("load_format", get_args(LoadFormat)),
        ):
            if settings[name] not in allowed:
                raise ValueError(f"{name} is {settings[name]!r}; allowed: {', '.join(allowed)}")
        _ = self.speculation
        if self.world > 1 and self.speculative_method in ("medusa", "eagle"):
            raise ValueError(
                f"speculative_method is {self.speculative_method!r}; allowed with "
                f"{self.world} ranks (tensor_parallel_size x pipeline_parallel_size): none, ngram, draft"
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
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; allowed: at least max_num_seqs "
                f"({self.max_num_seqs}), so that every running sequence can decode in every step"
            )

    @property
    def world(self) -> int:
        """How many ranks the model is split over."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def speculation(self) -> SpeculationConfig:
        """ValueError if its options do not go together."""
        return SpeculationConfig(
            self.speculative_method,
            self.speculative_model,
            self.num_speculative_tokens,
            self.speculative_ngram_min,
            self.speculative_ngram_max,
        )

    def limits(self, model_max_len: int, longest_shared_prompt: int | None = None) -> SchedulerLimits:
        """The scheduler's part, for a model whose context is ``model_max_len`` tokens."""
        if self.max_model_len is not None and self.max_model_len > model_max_len:
            raise ValueError(
                f"max_model_len is {self.max_model_len}; allowed: at most {model_max_len}, the model's"
            )
        return SchedulerLimits(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            prefill_chunk=self.prefill_chunk,
            max_model_len=self.max_model_len or model_max_len,
            chunked_prefill=self.chunked_prefill,
            prefix_caching=self.prefix_caching,
            longest_shared_prompt=longest_shared_prompt,
            priority_aging=self.priority_aging,
            mixed_prefill_tokens=self.mixed_prefill_tokens,
        )
