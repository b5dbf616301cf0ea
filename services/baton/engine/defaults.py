"""The sizes of an engine's blocks and steps where its options leave them open: one table, by the kind of
device. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from baton.core.role import Role

LARGE_BYTES = 64 << 30
"""Memory of a large CUDA device: an H100, an A100 of 80 GB, or more. Weights of 8 B parameters in bfloat16
leave room for the KV of 512 sequences of some 800 tokens there."""

LARGEST_GRAPH = 512
"""Rows of the largest CUDA graph. Beyond, a step takes the device longer than its launches take the host."""


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The sizes of an engine's blocks and steps. ValueError unless every sequence can decode in every
    step."""

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_chunk: int

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; allowed: at least max_num_seqs "
                f"({self.max_num_seqs}), so that every running sequence can decode in every step"
            )


@dataclass(frozen=True, slots=True)
class DeviceDefaults:
    """The defaults for one kind of device."""

    name: str
    sizes: StepSizes
    decode_mixed_tokens: int
    """``mixed_prefill_tokens`` of a decode worker."""
    mixed_tokens: int | None
    """``mixed_prefill_tokens`` of other workers; None: no limit of its own."""
    reason: str

    def mixed_prefill_tokens(self, role: Role) -> int | None:
        """The default of ``SchedulerLimits.mixed_prefill_tokens`` for a role. A decode worker gets so many
        that fewer would cost running answers hardly less."""
        return self.decode_mixed_tokens if role == "decode" else self.mixed_tokens


CPU = DeviceDefaults(
    "a CPU",
    StepSizes(block_size=16, max_num_seqs=64, max_num_batched_tokens=512, prefill_chunk=256),
    decode_mixed_tokens=64,
    mixed_tokens=None,
    reason="a step of 64 prompt tokens multiplies almost as fast as one of 512",
)
"""A chunk of 64 tokens multiplies almost as fast as a chunk of 512 (docs/benchmarks/2026-11-22-split.md)."""
CUDA = DeviceDefaults(
    "a CUDA device",
    StepSizes(block_size=64, max_num_seqs=256, max_num_batched_tokens=8192, prefill_chunk=2048),
    decode_mixed_tokens=256,
    mixed_tokens=1024,
    reason="a step reads all weights, whether for few rows or many",
)
"""The reasons, with estimates for an 8 B model in bfloat16 on an H100 (3 TB/s, 680 TFLOP/s in matmuls):

- Blocks of 64: a tile of attention is one block, one address instead of four.
- 256 sequences: a decode step reads 15 GB of weights for 1 row or for 256. From a few hundred rows on,
  reading their KV takes longer than that.
- Steps of 8,192 tokens in chunks of 2,048. From about 300 tokens on, a chunk multiplies for longer than it
  reads weights; 2,048 take 50 ms, and to launch them takes less than 8. Longer chunks gain little, and
  cost: a handoff sends the KV of the last chunk when all else is done. Four prompts share a step, so that a
  short one need not wait for a long one.
- Beside running answers, 1,024 tokens at most: 30 ms, which with the decoding of 64 sequences stays below
  50 ms between two tokens. 256 on a decode worker: as many rows as cost nothing beside the weights."""
LARGE_CUDA = DeviceDefaults(
    f"a CUDA device of {LARGE_BYTES >> 30} GiB or more",
    StepSizes(block_size=64, max_num_seqs=512, max_num_batched_tokens=8192, prefill_chunk=2048),
    decode_mixed_tokens=256,
    mixed_tokens=1024,
    reason="a step reads all weights, whether for few rows or many",
)


def defaults_of(device: str, device_bytes: int = 0) -> DeviceDefaults:
    """The defaults for a device, by its name (``cpu``, ``cuda`` or ``cuda:N``) and its memory; 0: unknown."""
    if device == "cpu":
        return CPU
    return LARGE_CUDA if device_bytes >= LARGE_BYTES else CUDA
