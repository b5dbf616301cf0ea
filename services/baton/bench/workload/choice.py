"""Makes the items of the configured workload."""

from __future__ import annotations

from pathlib import Path

from baton.bench.workload.burstgpt import read_burstgpt
from baton.bench.workload.config import WorkloadConfig
from baton.bench.workload.items import Item
from baton.bench.workload.mooncake import read_mooncake
from baton.bench.workload.sharegpt import read_sharegpt
from baton.bench.workload.synthetic import like_sharegpt, random_lengths, shared_prefix
from baton.text.tokenizer import Tokenizer


def make_items(config: WorkloadConfig, tokenizer: Tokenizer) -> list[Item]:
    """Make the items of a workload; a file may have fewer than were asked for. Raises WorkloadError."""
    count, seed = config.num_prompts, config.seed
    lengths = config.input_len, config.output_len, config.range_ratio
    match config.workload, config.dataset:
        case "shared-prefix", _:
            return shared_prefix(count, config.num_prefixes, config.prefix_len, *lengths, seed)
        case "sharegpt", None:
            return like_sharegpt(count, seed)
        case "sharegpt", Path() as path:
            return read_sharegpt(path, count, tokenizer, seed)
        case "mooncake", Path() as path:
            return read_mooncake(path, count, seed)
        case "burstgpt", Path() as path:
            return read_burstgpt(path, count, seed)
        case _:
            return random_lengths(count, *lengths, seed)
