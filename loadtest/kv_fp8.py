"""What a KV cache of FP8 costs in agreement and gives in room: the demo model's greedy answers beside those over
KV of its own type.

    python -m loadtest.kv_fp8 [--model demo] [--dtype bfloat16] [--tokens 2000]

Prints the share of tokens that are equal step by step along the answers over exact KV (each step sees those
tokens, so that one difference does not count for all that follow it), the share of free-running answers that
is equal up to the first difference, and how many sequences of 1,024 tokens a pool of 256 MiB holds.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import takewhile
from typing import get_args

import torch

from baton import LLM, SamplingParams
from baton.hub import resolve_model
from baton.models.config import KVCacheDtype, ModelConfig
from baton.models.loader import kv_dtype, kv_layout, torch_dtype

TOPICS = (
    *("Baton", "prefill", "decode", "paged attention", "continuous batching", "a KV block", "the router"),
    *("a handoff", "a prefix cache", "speculative decoding", "tensor parallelism", "a grammar", "a tenant"),
    *("an incarnation", "a lease", "the planner", "the ledger", "sampling", "preemption", "a drain"),
)
POOL_BYTES = 256 << 20
SEQUENCE = 1024
BLOCK_SIZE = 16


def prompts() -> list[str]:
    return [f"<|im_start|>user\nWhat is {topic}?<|im_end|>\n<|im_start|>assistant\n" for topic in TOPICS]


def answers(llm: LLM, tokens: int) -> list[tuple[list[int], list[int]]]:
    """The ids of each prompt and of its greedy answer, ``tokens`` long."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    found = llm.generate(prompts(), params, progress=False)
    return [(list(one.prompt_token_ids), list(one.outputs[0].token_ids)) for one in found]


def likeliest(llm: LLM, asked: Sequence[tuple[list[int], list[int]]]) -> int:
    """The tokens of all answers that are the likeliest behind their prompt and the answer before them."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found = llm.generate([prompt + answer for prompt, answer in asked], params, progress=False)
    equal = 0
    for (_, answer), one in zip(asked, found, strict=True):
        assert one.prompt_logprobs is not None
        equal += sum(rank == 1 for rank in one.prompt_logprobs.ranks[-len(answer) :])
    return equal


def sequences(model: str, dtype: str, kept_in: KVCacheDtype) -> int:
    """The sequences that a pool of ``POOL_BYTES`` holds."""
    config = ModelConfig.from_dir(resolve_model(model))
    held = kv_dtype(kept_in, config, torch_dtype(dtype, config), "cpu")
    layout = kv_layout(config, BLOCK_SIZE, held)
    pages = POOL_BYTES // layout.page_bytes
    return pages // (layout.num_tables * (SEQUENCE // BLOCK_SIZE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=2000, help="of all answers together")
    given = parser.parse_args()
    each = -(-given.tokens // len(TOPICS))
    auto, fp8 = (
        LLM(given.model, dtype=given.dtype, device="cpu", block_size=BLOCK_SIZE, kv_cache_dtype=kept_in)
        for kept_in in get_args(KVCacheDtype)
    )
    exact = answers(auto, each)
    count = sum(len(answer) for _, answer in exact)
    along, again = likeliest(fp8, exact), likeliest(auto, exact)
    free = [
        sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=True)))
        for (_, theirs), (_, ours) in zip(exact, answers(fp8, each), strict=True)
    ]
    print(f"{count} tokens of {len(TOPICS)} answers, {given.dtype}, torch {torch.__version__}")
    print(f"equal step by step along the answers: {along / count:.2%}")
    print(f"  (computed again over exact KV, as one prompt: {again / count:.2%})")
    print(f"equal up to the first difference: {sum(free) / count:.2%}")
    ours, theirs = (sequences(given.model, given.dtype, kept_in) for kept_in in ("fp8", "auto"))
    print(f"sequences of {SEQUENCE} tokens in {POOL_BYTES >> 20} MiB: {ours}, against {theirs}")


if __name__ == "__main__":
    main()
