"""What a KV cache of FP8 costs in agreement and gives in room, beside KV of the model's own type.

    python -m loadtest.kv_fp8 [--dtype bfloat16] [--tokens 2000]

The demo model answers greedily: questions that it knows, each to the answer's end, and questions about which
it writes on behind that, where its guesses are closer. Printed are the share of tokens that are equal step by
step along the answers over exact KV (each step sees those tokens, so that one difference does not count for
all that follow it), the share of free-running answers that is equal up to the first difference, and how many
sequences of 1,024 tokens a pool of 256 MiB holds.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from baton import LLM, SamplingParams
from baton.hub import resolve_model
from baton.models.config import KVCacheDtype, ModelConfig
from baton.models.loader import kv_dtype, kv_layout, torch_dtype
from scripts.demo_model.text import load_entries

CORPUS = Path(__file__).parents[1] / "scripts/demo_model/corpus"
LONGEST = 100
"""Tokens of an answer that is not ended."""
POOL_BYTES = 256 << 20
SEQUENCE = 1024
BLOCK_SIZE = 16


Asked = Sequence[tuple[list[int], list[int]]]
"""The ids of each prompt and of its answer."""


def answers(llm: LLM, questions: Sequence[str], *, ends: bool) -> Asked:
    """The greedy answers, to their end or, unless each ``ends`` itself, of ``LONGEST`` tokens."""
    params = SamplingParams(temperature=0, max_tokens=LONGEST, ignore_eos=not ends)
    prompts = [f"<|im_start|>user\n{one}<|im_end|>\n<|im_start|>assistant\n" for one in questions]
    found = llm.generate(prompts, params, progress=False)
    return [(list(one.prompt_token_ids), list(one.outputs[0].token_ids)) for one in found]


def likeliest(llm: LLM, asked: Asked) -> int:
    """The tokens of all answers that are the likeliest behind their prompt and the answer before them."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found = llm.generate([prompt + answer for prompt, answer in asked], params, progress=False)
    equal = 0
    for (_, answer), one in zip(asked, found, strict=True):
        assert one.prompt_logprobs is not None
        equal += sum(rank == 1 for rank in one.prompt_logprobs.ranks[-len(answer) :])
    return equal


def sequences(model: str, dtype: str, kept_in: KVCacheDtype) -> int:
    """The sequences of ``SEQUENCE`` tokens that a pool of ``POOL_BYTES`` holds."""
    config = ModelConfig.from_dir(resolve_model(model))
    held = kv_dtype(kept_in, config, torch_dtype(dtype, config), "cpu")
    layout = kv_layout(config, BLOCK_SIZE, held)
    pages = POOL_BYTES // layout.page_bytes
    return pages // (layout.num_tables * (SEQUENCE // BLOCK_SIZE))


def compare(auto: LLM, fp8: LLM, questions: Sequence[str], *, ends: bool) -> None:
    """Print how far the answers over both are equal."""
    exact = answers(auto, questions, ends=ends)
    count = sum(len(answer) for _, answer in exact)
    along, again = likeliest(fp8, exact) / count, likeliest(auto, exact) / count
    free = [
        sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False)))
        for (_, theirs), (_, ours) in zip(exact, answers(fp8, questions, ends=ends), strict=True)
    ]
    print(
        f"{count} tokens of {len(exact)} answers, {'to their ends' if ends else 'and on behind their ends'}"
    )
    print(f"  equal step by step along the answers: {along:.2%} (exact KV, as one prompt: {again:.2%})")
    print(f"  equal up to the first difference: {sum(free) / count:.2%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=2000, help="at least, of all answers together")
    given = parser.parse_args()
    kinds: tuple[KVCacheDtype, KVCacheDtype] = ("auto", "fp8")
    auto, fp8 = (
        LLM("demo", dtype=given.dtype, device="cpu", block_size=BLOCK_SIZE, kv_cache_dtype=kept_in)
        for kept_in in kinds
    )
    known = [entry.questions[0] for entry in load_entries(CORPUS)]
    few = -(-given.tokens // LONGEST)
    compare(auto, fp8, known[:: max(1, len(known) // (3 * few))], ends=True)
    compare(auto, fp8, known[:: len(known) // few][:few], ends=False)
    theirs, ours = (sequences("demo", given.dtype, kept_in) for kept_in in kinds)
    print(f"sequences of {SEQUENCE} tokens in {POOL_BYTES >> 20} MiB: {ours}, against {theirs}")


if __name__ == "__main__":
    main()
