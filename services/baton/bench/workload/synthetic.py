"""Generated workloads: random lengths, shared prefixes, lengths like those of chats."""

from __future__ import annotations

import math
import random

from baton.bench.workload.items import Item, PromptPiece

_LONGEST = 1024
"""Most tokens of a ShareGPT-like prompt or answer."""


def random_lengths(count: int, input_len: int, output_len: int, spread: float, seed: int) -> list[Item]:
    """Make prompts that have nothing in common. Lengths are uniform in ``len · (1 ± spread)``, at least 1."""
    rng = random.Random(f"random-{seed}")
    return [
        _item(
            (PromptPiece(f"{seed}-{index}", _around(rng, input_len, spread)),),
            _around(rng, output_len, spread),
        )
        for index in range(count)
    ]


def shared_prefix(
    count: int, prefixes: int, prefix_len: int, input_len: int, output_len: int, spread: float, seed: int
) -> list[Item]:
    """Make prompts that begin with one of ``prefixes`` prefixes of ``prefix_len`` tokens, drawn evenly, and
    go on with ``input_len`` tokens of their own."""
    rng = random.Random(f"shared-prefix-{seed}")
    return [
        _item(
            (
                PromptPiece(f"{seed}-prefix-{rng.randrange(prefixes)}", prefix_len),
                PromptPiece(f"{seed}-{index}", _around(rng, input_len, spread)),
            ),
            _around(rng, output_len, spread),
        )
        for index in range(count)
    ]


def like_sharegpt(count: int, seed: int) -> list[Item]:
    """Draw lengths like those of chats: log-normal with mean 161 and sigma 1.2 for prompts, mean 338 and
    sigma 0.9 for answers, cut at 1 and 1,024 tokens. The means are those that the vLLM paper (SOSP 2023)
    gives for ShareGPT; the sigmas are chosen, not fitted."""
    rng = random.Random(f"sharegpt-{seed}")
    return [
        _item((PromptPiece(f"{seed}-{index}", _log_normal(rng, 161, 1.2)),), _log_normal(rng, 338, 0.9))
        for index in range(count)
    ]


def _item(prompt: tuple[PromptPiece, ...], output_tokens: int) -> Item:
    return Item(prompt, sum(piece.tokens for piece in prompt), output_tokens)


def _around(rng: random.Random, length: int, spread: float) -> int:
    low, high = round(length * (1 - spread)), round(length * (1 + spread))
    return rng.randint(max(1, low), max(1, high))


def _log_normal(rng: random.Random, mean: float, sigma: float) -> int:
    drawn = rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)
    return min(_LONGEST, max(1, round(drawn)))
