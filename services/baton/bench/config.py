"""What is measured, and how: the options of the commands, checked."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated
from urllib.parse import SplitResult, urlsplit

from baton.bench.goals import Goals
from baton.bench.workload.config import (
    TRACES,
    WORKLOAD,
    Seed,
    WorkloadConfig,
    check_between,
    check_positive,
)
from baton.process.fields import Option, check_options
from baton.process.options import ConfigError

PROMPT_FORMS = ("auto", "ids", "text")
SERVER, OFFER = "Server", "How it is offered"
"""The headings of these options in help."""
_MOST = 1_000_000


def parse_url(option: str, url: str) -> SplitResult:
    """The server's address, without ``/v1``. Raises ConfigError that names ``option``."""
    base = urlsplit(url.rstrip("/").removesuffix("/v1"))
    try:
        usable = base.scheme in ("http", "https") and base.hostname and (base.port or 1)
    except ValueError:  # a port out of range
        usable = False
    if not usable:
        raise ConfigError(option, f"{url!r} is not an address; write it like http://127.0.0.1:8000")
    return base


def check_url(option: str, url: str) -> None:
    """Raise ConfigError unless ``url`` is a server's address."""
    parse_url(option, url)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """What to measure and how to offer it. Raises ConfigError for a value that cannot work."""

    workload: WorkloadConfig
    url: Annotated[str, Option("Address of an OpenAI-compatible server.", SERVER, check=check_url)] = (
        "http://127.0.0.1:8000"
    )
    model: Annotated[str | None, Option("Default: the first that the server names.", SERVER)] = None
    tokenizer: Annotated[
        str | None,
        Option("Model directory or hub id whose vocabulary prompts are made of. Default: --model.", SERVER),
    ] = None
    api_key: Annotated[
        str | None,
        Option(
            "Sent as a bearer token. Better given in the environment.",
            SERVER,
            env="OPENAI_API_KEY",
            show_default=False,
            secret=True,
        ),
    ] = None
    prompts: Annotated[
        str,
        Option("ids, text, or auto: token ids where the server takes them.", SERVER, choices=PROMPT_FORMS),
    ] = "auto"
    ignore_eos: Annotated[
        bool, Option("Have the server go on to the full length of each answer.", SERVER)
    ] = True
    temperature: Annotated[float, Option("Of the sampling.", SERVER)] = 0.0
    request_rate: Annotated[
        float | None,
        Option("Requests/s in the mean, or inf. Default: a trace's own times, otherwise all at once.", OFFER),
    ] = None
    burstiness: Annotated[
        float,
        Option(
            "Shape of the gamma distribution of the gaps: 1 is Poisson, less is burstier, more steadier.",
            OFFER,
        ),
    ] = 1.0
    max_concurrency: Annotated[
        int | None, Option("Keep so many requests open instead.", OFFER, least=1, most=100_000)
    ] = None
    """A closed loop, instead of times."""
    speedup: Annotated[float, Option("A trace's times are divided by this.", OFFER)] = 1.0
    goals: Goals = field(default_factory=Goals)
    timeout: Annotated[float, Option("Seconds until a request is given up.", OFFER)] = 600.0

    def __post_init__(self) -> None:
        check_options(self)
        check_between("temperature", self.temperature, 0, 2)
        check_positive("timeout", self.timeout)
        check_positive("burstiness", self.burstiness)
        check_positive("speedup", self.speedup)
        if self.request_rate is not None and not self.request_rate > 0:
            raise ConfigError("request_rate", f"must be above 0, or inf, not {self.request_rate:g}")
        if self.max_concurrency is not None and self.request_rate is not None:
            raise ConfigError("max_concurrency", "cannot be given together with --request-rate")
        if self.speedup != 1 and not self.keeps_times:
            raise ConfigError("speedup", "can only be given where a trace says when to send")
        if self.burstiness != 1 and self.request_rate in (None, math.inf):
            raise ConfigError("burstiness", "can only be given with a finite --request-rate")

    @property
    def keeps_times(self) -> bool:
        """Whether requests are sent when a trace says."""
        timed = self.workload.workload in TRACES
        return timed and self.request_rate is None and self.max_concurrency is None


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyConfig:
    """One batch, and how often. Raises ConfigError for a value that cannot work."""

    batch_size: Annotated[int, Option("Prompts in the batch.", WORKLOAD, least=1, most=_MOST)] = 8
    input_len: Annotated[
        int, Option("Prompt tokens; with shared-prefix: after the prefix.", WORKLOAD, least=1, most=_MOST)
    ] = 32
    output_len: Annotated[int, Option("Tokens of each answer.", WORKLOAD, least=1, most=_MOST)] = 128
    warmups: Annotated[int, Option("Batches before the first that counts.", OFFER, least=0, most=_MOST)] = 3
    repeats: Annotated[int, Option("Batches that count.", OFFER, least=1, most=_MOST)] = 10
    seed: Seed = 0

    def __post_init__(self) -> None:
        check_options(self)
