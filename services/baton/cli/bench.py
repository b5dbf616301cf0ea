"""``baton bench``: its commands. Each imports what it runs when it runs, as in `cli.main`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from baton.bench.config import OFFER, SERVER, LatencyConfig, ServeConfig
from baton.bench.document import check_writable
from baton.bench.goals import parse_goals
from baton.bench.plots import check_plot
from baton.bench.sweep.config import SearchConfig
from baton.bench.workload.config import WorkloadConfig
from baton.cli import arguments as arg
from baton.cli.derived import Given, OptionsOf, takes
from baton.process.options import ConfigError
from baton.worker.config import SERVING_ONLY, WorkerConfig

_RESULT = "Result"

Goodput = Annotated[
    list[str] | None,
    typer.Option(
        metavar="GOALS",
        help="Count requests that meet all of these, as 'ttft:500 tpot:50', in milliseconds; names: ttft, "
        "tpot, itl (99 % of a request's), e2e.",
        rich_help_panel=OFFER,
    ),
]
JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="FILE", help="Write all figures, settings and times.", rich_help_panel=_RESULT
    ),
]
PlotFile = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", help="Draw the result; .svg or .png.", rich_help_panel=_RESULT),
]

_ENGINE = OptionsOf(WorkerConfig, without={*SERVING_ONLY, "mixed_prefill_tokens"})
"""Nothing decodes beside the prompts of these measurements."""

bench = typer.Typer(
    name="bench",
    no_args_is_help=True,
    help="Measure the engine or a server, or find the settings that suit a load.",
)


@bench.command()
@takes(OptionsOf(LatencyConfig), "json", _ENGINE)
def latency(given: Given, json: JsonFile = None) -> None:
    """Time one batch in the engine, without a server: the whole of it and per token."""
    check_writable("json", json)
    config = LatencyConfig(**given.fields(LatencyConfig))
    worker = WorkerConfig(role="both", **given.fields(WorkerConfig))

    from baton.cli.bench_offline import run_latency

    run_latency(worker, config, json)


@bench.command()
@takes(OptionsOf(WorkloadConfig), "json", _ENGINE)
def throughput(given: Given, json: JsonFile = None) -> None:
    """Have the engine do a whole workload, without a server: requests and tokens per second."""
    check_writable("json", json)
    config = WorkloadConfig(**given.fields(WorkloadConfig))
    worker = WorkerConfig(role="both", **given.fields(WorkerConfig))

    from baton.cli.bench_offline import run_throughput

    run_throughput(worker, config, json)


@bench.command()
@takes(
    OptionsOf(ServeConfig, panel=SERVER),
    OptionsOf(WorkloadConfig),
    OptionsOf(ServeConfig, without=("timeout",)),
    "goodput",
    OptionsOf(ServeConfig),
)
def serve(given: Given, goodput: Goodput = None, json: JsonFile = None, plot: PlotFile = None) -> None:
    """Measure a running server: latencies, throughput, errors, goodput."""
    check_writable("json", json)
    check_plot("plot", plot)
    load = WorkloadConfig(**given.fields(WorkloadConfig))
    goals = parse_goals("goodput", goodput or ())
    config = ServeConfig(**given.fields(ServeConfig), workload=load, goals=goals)

    from baton.cli.bench_serve import run_serve

    run_serve(config, json, plot)


@bench.command()
@takes(
    "goodput",
    OptionsOf(SearchConfig, without=("seed",)),
    OptionsOf(WorkloadConfig, without=("num_prompts",)),
    OptionsOf(ServeConfig, only=("burstiness",)),
    *("json", "plot"),
    OptionsOf(
        WorkerConfig,
        only=(
            *("model", "dtype", "quantization", "device", "load_format", "max_model_len"),
            *("connector", "block_size", "num_blocks", "kv_cache_memory"),
        ),
        help={"device": arg.DEVICES},
    ),
)
def sweep(given: Given, goodput: Goodput = None, json: JsonFile = None, plot: PlotFile = None) -> None:
    """Find the settings with the highest goodput: start rings, measure them, and end in the time given.

    Prints the `baton up` to use. The defaults are measured beside the candidates, in turns.
    """
    check_writable("json", json)
    check_plot("plot", plot)
    search = SearchConfig(**given.fields(SearchConfig))
    goals = parse_goals("goodput", goodput or ())
    if not goals:
        raise ConfigError("goodput", "is needed: say what a good answer is, as 'ttft:500 itl:50'")
    load = WorkloadConfig(**given.fields(WorkloadConfig))
    # The rate is a placeholder: each probe has its own.
    offer = ServeConfig(workload=load, goals=goals, **given.fields(ServeConfig, "model"), request_rate=1.0)
    searched = ("max_num_seqs", "max_num_batched_tokens", "prefill_chunk", "device")
    named, options = str(given.values["device"]).split(","), given.fields(WorkerConfig, *searched)
    worker, *_ = [WorkerConfig(role="both", device=one, **options) for one in named]

    from baton.bench.offline.devices import all_devices
    from baton.cli.bench_ring import LocalRings
    from baton.cli.bench_sweep import run_sweep

    devices = all_devices() if named == ["auto"] else named
    run_sweep(search, LocalRings(worker, devices), offer, json, plot)
