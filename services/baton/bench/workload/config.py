"""The options of a workload, checked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from baton.process.fields import Option, check_options
from baton.process.options import ConfigError

WORKLOAD = "Workload"
"""The heading of these options in help."""
WORKLOADS = ("random", "shared-prefix", "sharegpt", "mooncake", "burstgpt")
TRACES = ("mooncake", "burstgpt")
"""Traces, which say when to send."""
_MAX_REQUESTS = 1_000_000
_MAX_TOKENS = 10_000_000

Seed = Annotated[
    int,
    Option(
        "Draws prompts, lengths and times. Take another for each run against one server: its prefix "
        "cache knows the prompts of the last.",
        WORKLOAD,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadConfig:
    """The options of a workload. Raises ConfigError for a value that cannot work."""

    workload: Annotated[
        str,
        Option(
            "random, shared-prefix, sharegpt (lengths as chats have them, or those of --dataset), mooncake "
            "or burstgpt (traces from --dataset).",
            WORKLOAD,
            choices=WORKLOADS,
        ),
    ] = "random"
    dataset: Annotated[
        Path | None,
        Option(
            "ShareGPT's JSON, Mooncake's JSON lines or BurstGPT's CSV.",
            WORKLOAD,
            metavar="FILE",
        ),
    ] = None
    num_prompts: Annotated[int, Option("How many requests.", WORKLOAD, least=1, most=_MAX_REQUESTS)] = 100
    input_len: Annotated[
        int,
        Option("Prompt tokens; with shared-prefix: after the prefix.", WORKLOAD, least=1, most=_MAX_TOKENS),
    ] = 128
    output_len: Annotated[int, Option("Tokens of each answer.", WORKLOAD, least=1, most=_MAX_TOKENS)] = 32
    range_ratio: Annotated[
        float, Option("Lengths are drawn evenly from len*(1-R) to len*(1+R); 0 to 1.", WORKLOAD)
    ] = 0.0
    prefix_len: Annotated[
        int, Option("With shared-prefix: tokens of a prefix.", WORKLOAD, least=1, most=_MAX_TOKENS)
    ] = 256
    num_prefixes: Annotated[
        int, Option("With shared-prefix: how many there are.", WORKLOAD, least=1, most=_MAX_REQUESTS)
    ] = 4
    seed: Seed = 0

    def __post_init__(self) -> None:
        check_options(self)
        check_between("range_ratio", self.range_ratio, 0, 1)
        if self.workload in TRACES and self.dataset is None:
            raise ConfigError("dataset", f"--workload {self.workload} needs the path of a trace")
        if self.dataset is not None and self.workload not in (*TRACES, "sharegpt"):
            allowed = ", ".join(("sharegpt", *TRACES))
            raise ConfigError("dataset", f"can only be given with --workload {allowed}")
        if self.dataset is not None and not self.dataset.is_file():
            raise ConfigError("dataset", f"{self.dataset} is no file")


def check_between(option: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # also where it is no number
        raise ConfigError(option, f"must be from {low:g} to {high:g}, not {value:g}")


def check_positive(option: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ConfigError(option, f"must be above 0, not {value:g}")
