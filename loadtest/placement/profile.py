"""How fast the simulated workers are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Profile:
    """About a Llama of 8 billion parameters in bfloat16 with one GPU of the H100's kind for each worker: a
    round guess from its arithmetic and bandwidth, not a measurement. What is compared is policies.

    A step of n sequences and c prompt tokens takes ``base_s + n * row_s + c / tokens_per_s``. That chunk and
    decode add up in full is hard on prompts computed beside streams: on a GPU they share the weights' reads.
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
    """Of a worker's pool: 192,000 tokens, 25 GB."""
    kv_bytes_per_token: int = 131_072
    """32 layers, 8 KV heads of 128, K and V, 2 bytes."""
    link_bytes_per_s: float = 20e9
    """Of a prefill worker, for all it sends."""
    message_s: float = 0.001
    """Any message's way."""
    heartbeat_s: float = 0.5
    """Between the reports of a worker that has no tokens to deliver."""

    def step_s(self, rows: int, prompt_tokens: int) -> float:
        return self.base_s + rows * self.row_s + prompt_tokens / self.tokens_per_s
