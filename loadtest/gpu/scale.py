"""The sizes of every measurement. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """The sizes of every measurement."""

    model: str
    """A name of ``loadtest.shapes.SHAPES``."""
    mixture: str
    """A name of a model with experts."""
    small_model: str
    """The random model whose answers are compared."""
    dtype: str
    block_size: int
    batches: Sequence[int]
    contexts: Sequence[int]
    prompts: Sequence[int]
    mixed: Sequence[tuple[int, int]]
    """(rows that decode, tokens of the chunk beside them)."""
    kv_bytes: int
    """The size in bytes of the pool that steps read; sequences share blocks if it is too small for all of
    theirs."""
    input_len: int
    output_len: int
    message_blocks: Sequence[int]
    round_bytes: int
    """The bytes of one round between two pools."""
    nccl_round_bytes: int
    condition_seconds: float
    """The time for the rounds of one condition. One round is always run."""
    handoff_kv_bytes: int
    handoff_rows: int
    """The sequences that each engine decodes while blocks move."""
    disturbing: tuple[int, int]
    """(prompts, tokens of each) that come while sequences decode."""
    disturbed_rows: int
    speculative_batches: Sequence[int]
    tier_prompts: tuple[int, int]
    """(prompts, tokens of each) that go through the host tier: the pool holds half of them."""
    long_context: int
    new_tokens: int
    """The tokens of answers whose steps are timed."""


FULL = Scale(
    model="llama-8b",
    mixture="qwen3-30b-a3b-quarter",
    small_model="llama-small",
    dtype="bfloat16",
    block_size=64,
    batches=(1, 16, 64, 256),
    contexts=(1024, 8192),
    prompts=(1024, 8192),
    mixed=((16, 512), (64, 512), (64, 2048), (256, 512)),
    kv_bytes=40 << 30,
    input_len=1024,
    output_len=128,
    message_blocks=(1, 16),
    round_bytes=1 << 30,
    nccl_round_bytes=256 << 20,
    condition_seconds=3.0,
    handoff_kv_bytes=12 << 30,
    handoff_rows=32,
    disturbing=(4, 8192),
    disturbed_rows=64,
    speculative_batches=(1, 16),
    tier_prompts=(16, 2048),
    long_context=131_072,
    new_tokens=64,
)
TINY = Scale(
    model="llama-tiny",
    mixture="mixture-tiny",
    small_model="llama-tiny",
    dtype="float32",
    block_size=16,
    batches=(1, 3),
    contexts=(20, 40),
    prompts=(40,),
    mixed=((3, 24),),
    kv_bytes=1 << 20,
    input_len=24,
    output_len=8,
    message_blocks=(1, 4),
    round_bytes=1 << 18,
    nccl_round_bytes=1 << 17,
    condition_seconds=0.0,
    handoff_kv_bytes=1 << 20,
    handoff_rows=2,
    disturbing=(1, 60),
    disturbed_rows=2,
    speculative_batches=(1, 2),
    tier_prompts=(4, 64),
    long_context=600,
    new_tokens=6,
)
