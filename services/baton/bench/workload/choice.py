"""Which workload is wanted, and its items."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from baton.bench.workload.burstgpt import read_burstgpt
from baton.bench.workload.items import Item
from baton.bench.workload.mooncake import read_mooncake
from baton.bench.workload.sharegpt import read_sharegpt
from baton.bench.workload.synthetic import like_sharegpt, random_lengths, shared_prefix
from baton.options import ConfigError, check_choice, check_range
from baton.text.tokenizer import Tokenizer

WORKLOADS = ("random", "shared-prefix", "sharegpt", "mooncake", "burstgpt")
TRACES = ("mooncake", "burstgpt")
"""Those that say when to send."""

_MOST_REQUESTS = 1_000_000
_MOST_TOKENS = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadConfig:
    """The options of a workload. Raises ConfigError for a value that cannot work."""

    workload: str = "random"
    dataset: Path | None = None
    num_prompts: int = 100
    input_len: int = 128
    output_len: int = 32
    range_ratio: float = 0.0
    """Lengths are uniform in ``len · (1 ± range_ratio)``."""
    prefix_len: int = 256
    num_prefixes: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("workload", self.workload, WORKLOADS)
        check_range("num_prompts", self.num_prompts, 1, _MOST_REQUESTS)
        for option in ("input_len", "output_len", "prefix_len"):
            check_range(option, getattr(self, option), 1, _MOST_TOKENS)
        check_range("num_prefixes", self.num_prefixes, 1, _MOST_REQUESTS)
        check_range("range_ratio", self.range_ratio, 0, 1)
        if self.workload in TRACES and self.dataset is None:
            raise ConfigError("dataset", f"--workload {self.workload} needs the path of a trace")
        if self.dataset is not None and self.workload not in (*TRACES, "sharegpt"):
            allowed = ", ".join(("sharegpt", *TRACES))
            raise ConfigError("dataset", f"can only be given with --workload {allowed}")


def make_items(config: WorkloadConfig, tokenizer: Tokenizer) -> list[Item]:
    """The items of a workload; a file may have fewer than were asked for. Raises WorkloadError."""
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
