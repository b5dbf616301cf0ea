"""The speed of the simulated workers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Profile:
    """About a Llama of 8 billion parameters in bfloat16 with one GPU of the H100's kind for each worker: a
    round guess from its arithmetic and bandwidth, not a measurement. Only policies are compared.

    A step of n sequences and c prompt tokens takes ``base_s + n * row_s + c / tokens_per_s``. Adding chunk
    and decode in full is hard on prompts computed beside streams: on a GPU they share the weights' reads.
    """

    base_s: float = 0.008
    row_s: float = 0.00008
    tokens_per_s: float = 15_000.0
    chunk_tokens: int = 2048
    """Most prompt tokens of a step that decodes nothing."""
    mixed_tokens: int = 256
    """Most prompt tokens of a step that decodes."""
    max_running: int = 128
    block_size: int = 64
    num_blocks: int = 3000
    """The blocks of a worker's pool: 192,000 tokens, 25 GB."""
    kv_bytes_per_token: int = 131_072
    """32 layers, 8 KV heads of 128, K and V, 2 bytes."""
    link_bytes_per_s: float = 20e9
    """The bandwidth of a prefill worker, for everything it sends."""
    message_s: float = 0.001
    """The time that any message takes."""
    heartbeat_s: float = 0.5
    """The time between the reports of a worker that has no tokens to deliver."""

    def step_s(self, rows: int, prompt_tokens: int) -> float:
        return self.base_s + rows * self.row_s + prompt_tokens / self.tokens_per_s
