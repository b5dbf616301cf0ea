"""``baton bench latency`` and ``throughput``: the engine in this process.

What imports torch is imported when it runs: the command line works where there is none.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from baton.bench.config import LatencyConfig
from baton.bench.document import write_document
from baton.bench.tables import latency_table
from baton.bench.workload.config import WorkloadConfig
from baton.process.options import ModelError, StartError
from baton.text.errors import TokenizerError
from baton.worker.config import WorkerConfig

if TYPE_CHECKING:
    from baton import LLM


def run_latency(worker: WorkerConfig, config: LatencyConfig, json: Path | None) -> None:
    """Measure, show and write."""
    from baton.bench.offline.latency import latency

    result = latency(_llm(worker), config)
    shape = f"{config.batch_size} prompts of {config.input_len} tokens, answers of {config.output_len}"
    rows = {"whole batch": result.whole, "per token": result.per_token}
    Console().print(latency_table(rows, f"{worker.model_name}: {shape}, {config.repeats} times"))
    if json is not None:
        write_document(
            json, "latency", settings=asdict(config), engine=_settings(worker), figures=asdict(result)
        )


def run_throughput(worker: WorkerConfig, config: WorkloadConfig, json: Path | None) -> None:
    """Measure, show and write."""
    from baton.bench.offline.throughput import throughput

    result = throughput(_llm(worker), config)
    rates = {
        "requests_per_s": result.requests_per_s,
        "prompt_tokens_per_s": result.prompt_tokens_per_s,
        "output_tokens_per_s": result.output_tokens_per_s,
    }
    print(f"{worker.model_name}: {result.requests} requests in {result.duration:.2f} s")
    print(f"requests            {result.requests_per_s:.2f}/s")
    print(f"prompt tokens       {result.prompt_tokens_per_s:.1f}/s ({result.prompt_tokens})")
    print(f"output tokens       {result.output_tokens_per_s:.1f}/s ({result.output_tokens})")
    if result.left_out:
        print(f"left out            {result.left_out} longer than the model's context")
    if json is not None:
        figures = {**asdict(result), **rates}
        write_document(json, "throughput", settings=asdict(config), engine=_settings(worker), figures=figures)


def _settings(worker: WorkerConfig) -> dict[str, object]:
    """What of a worker's settings the engine has."""
    apart = {
        "role",
        "host",
        "advertise",
        "port",
        "metrics_port",
        "data_port",
        "cluster_key",
        "cluster_key_previous",
        "log_level",
    }
    return {name: value for name, value in asdict(worker).items() if name not in apart}


def _llm(config: WorkerConfig) -> LLM:
    from baton import LLM

    try:
        return LLM(config.model, **config.engine_settings())
    except (ModelError, TokenizerError, ValueError) as error:
        raise StartError(str(error)) from error
