"""``baton bench``: its commands. Each imports what it runs when it runs, as in `cli.main`."""

from __future__ import annotations

import typer

from baton.bench.config import LatencyConfig, ServeConfig, WorkloadConfig
from baton.bench.document import check_writable
from baton.bench.goals import parse_goals
from baton.bench.plots import check_plot
from baton.bench.sweep.config import SearchConfig
from baton.cli import arguments as arg
from baton.cli import bench_options as opt
from baton.cli.given import given
from baton.options import ConfigError
from baton.worker.config import WorkerConfig

_WORKER = WorkerConfig(role="both")  # for its defaults
_LOAD = WorkloadConfig()
_SERVE = ServeConfig(workload=_LOAD)
_LATENCY = LatencyConfig()
_SEARCH = SearchConfig()

bench = typer.Typer(
    name="bench",
    no_args_is_help=True,
    help="Measure the engine or a server, or find the settings that suit a load.",
)


@bench.command()
def latency(
    ctx: typer.Context,
    batch_size: opt.BatchSize = _LATENCY.batch_size,
    input_len: opt.InputLen = _LATENCY.input_len,
    output_len: opt.OutputLen = _LATENCY.output_len,
    warmups: opt.Warmups = _LATENCY.warmups,
    repeats: opt.Repeats = _LATENCY.repeats,
    seed: opt.WorkloadSeed = _LATENCY.seed,
    json: opt.JsonFile = None,
    model: arg.Model = _WORKER.model,
    dtype: arg.Dtype = _WORKER.dtype,
    quantization: arg.Quantization = _WORKER.quantization,
    device: arg.Device = _WORKER.device,
    load_format: arg.LoadFormat = _WORKER.load_format,
    max_model_len: arg.MaxModelLen = None,
    block_size: arg.BlockSize = _WORKER.block_size,
    num_blocks: arg.NumBlocks = None,
    kv_cache_memory: arg.KvCacheMemory = None,
    max_num_seqs: arg.MaxNumSeqs = _WORKER.max_num_seqs,
    max_num_batched_tokens: arg.MaxNumBatchedTokens = _WORKER.max_num_batched_tokens,
    prefill_chunk: arg.PrefillChunk = _WORKER.prefill_chunk,
    chunked_prefill: arg.ChunkedPrefill = True,
    prefix_caching: arg.PrefixCaching = True,
    enforce_eager: arg.EnforceEager = False,
    speculative_method: arg.SpeculativeMethod = _WORKER.speculative_method,
    speculative_model: arg.SpeculativeModel = None,
    num_speculative_tokens: arg.NumSpeculativeTokens = _WORKER.num_speculative_tokens,
    speculative_ngram_min: arg.SpeculativeNgramMin = _WORKER.speculative_ngram_min,
    speculative_ngram_max: arg.SpeculativeNgramMax = _WORKER.speculative_ngram_max,
    tensor_parallel_size: arg.TensorParallelSize = _WORKER.tensor_parallel_size,
    pipeline_parallel_size: arg.PipelineParallelSize = _WORKER.pipeline_parallel_size,
    threads: arg.Threads = None,
) -> None:
    """Time one batch in the engine, without a server: the whole of it and per token."""
    check_writable("json", json)
    config = LatencyConfig(**given(ctx, LatencyConfig))
    worker = WorkerConfig(role="both", **given(ctx, WorkerConfig))

    from baton.cli.bench_offline import run_latency

    run_latency(worker, config, json)


@bench.command()
def throughput(
    ctx: typer.Context,
    workload: opt.Workload = _LOAD.workload,
    dataset: opt.Dataset = None,
    num_prompts: opt.NumPrompts = _LOAD.num_prompts,
    input_len: opt.InputLen = _LOAD.input_len,
    output_len: opt.OutputLen = _LOAD.output_len,
    range_ratio: opt.RangeRatio = _LOAD.range_ratio,
    prefix_len: opt.PrefixLen = _LOAD.prefix_len,
    num_prefixes: opt.NumPrefixes = _LOAD.num_prefixes,
    seed: opt.WorkloadSeed = _LOAD.seed,
    json: opt.JsonFile = None,
    model: arg.Model = _WORKER.model,
    dtype: arg.Dtype = _WORKER.dtype,
    quantization: arg.Quantization = _WORKER.quantization,
    device: arg.Device = _WORKER.device,
    load_format: arg.LoadFormat = _WORKER.load_format,
    max_model_len: arg.MaxModelLen = None,
    block_size: arg.BlockSize = _WORKER.block_size,
    num_blocks: arg.NumBlocks = None,
    kv_cache_memory: arg.KvCacheMemory = None,
    max_num_seqs: arg.MaxNumSeqs = _WORKER.max_num_seqs,
    max_num_batched_tokens: arg.MaxNumBatchedTokens = _WORKER.max_num_batched_tokens,
    prefill_chunk: arg.PrefillChunk = _WORKER.prefill_chunk,
    chunked_prefill: arg.ChunkedPrefill = True,
    prefix_caching: arg.PrefixCaching = True,
    enforce_eager: arg.EnforceEager = False,
    speculative_method: arg.SpeculativeMethod = _WORKER.speculative_method,
    speculative_model: arg.SpeculativeModel = None,
    num_speculative_tokens: arg.NumSpeculativeTokens = _WORKER.num_speculative_tokens,
    speculative_ngram_min: arg.SpeculativeNgramMin = _WORKER.speculative_ngram_min,
    speculative_ngram_max: arg.SpeculativeNgramMax = _WORKER.speculative_ngram_max,
    tensor_parallel_size: arg.TensorParallelSize = _WORKER.tensor_parallel_size,
    pipeline_parallel_size: arg.PipelineParallelSize = _WORKER.pipeline_parallel_size,
    threads: arg.Threads = None,
) -> None:
    """Have the engine do a whole workload, without a server: requests and tokens per second."""
    check_writable("json", json)
    config = WorkloadConfig(**given(ctx, WorkloadConfig))
    worker = WorkerConfig(role="both", **given(ctx, WorkerConfig))

    from baton.cli.bench_offline import run_throughput

    run_throughput(worker, config, json)


@bench.command()
def serve(
    ctx: typer.Context,
    url: opt.Url = _SERVE.url,
    model: opt.ServedModel = None,
    tokenizer: opt.TokenizerName = None,
    api_key: opt.ApiKey = None,
    prompts: opt.Prompts = _SERVE.prompts,
    ignore_eos: opt.IgnoreEos = _SERVE.ignore_eos,
    temperature: opt.Temperature = _SERVE.temperature,
    workload: opt.Workload = _LOAD.workload,
    dataset: opt.Dataset = None,
    num_prompts: opt.NumPrompts = _LOAD.num_prompts,
    input_len: opt.InputLen = _LOAD.input_len,
    output_len: opt.OutputLen = _LOAD.output_len,
    range_ratio: opt.RangeRatio = _LOAD.range_ratio,
    prefix_len: opt.PrefixLen = _LOAD.prefix_len,
    num_prefixes: opt.NumPrefixes = _LOAD.num_prefixes,
    seed: opt.WorkloadSeed = _LOAD.seed,
    request_rate: opt.RequestRate = None,
    burstiness: opt.Burstiness = _SERVE.burstiness,
    max_concurrency: opt.MaxConcurrency = None,
    speedup: opt.Speedup = _SERVE.speedup,
    goodput: opt.Goodput = None,
    timeout: opt.Timeout = _SERVE.timeout,
    json: opt.JsonFile = None,
    plot: opt.PlotFile = None,
) -> None:
    """Measure a running server: latencies, throughput, errors, goodput."""
    check_writable("json", json)
    check_plot("plot", plot)
    load = WorkloadConfig(**given(ctx, WorkloadConfig))
    goals = parse_goals("goodput", goodput or ())
    config = ServeConfig(**given(ctx, ServeConfig, "workload"), workload=load, goals=goals)

    from baton.cli.bench_serve import run_serve

    run_serve(config, json, plot)


@bench.command()
def sweep(
    ctx: typer.Context,
    goodput: opt.Goodput = None,
    minutes: opt.Minutes = _SEARCH.minutes,
    attainment: opt.Attainment = _SEARCH.attainment,
    splits: opt.Splits = None,
    max_num_seqs: opt.NumSeqsList = _SEARCH.max_num_seqs,
    max_num_batched_tokens: opt.BudgetList = _SEARCH.max_num_batched_tokens,
    prefill_chunk: opt.ChunkList = _SEARCH.prefill_chunk,
    cores: opt.Cores = None,
    workload: opt.Workload = _LOAD.workload,
    dataset: opt.Dataset = None,
    input_len: opt.InputLen = _LOAD.input_len,
    output_len: opt.OutputLen = _LOAD.output_len,
    range_ratio: opt.RangeRatio = _LOAD.range_ratio,
    prefix_len: opt.PrefixLen = _LOAD.prefix_len,
    num_prefixes: opt.NumPrefixes = _LOAD.num_prefixes,
    seed: opt.WorkloadSeed = _LOAD.seed,
    burstiness: opt.Burstiness = _SERVE.burstiness,
    json: opt.JsonFile = None,
    plot: opt.PlotFile = None,
    model: arg.Model = _WORKER.model,
    dtype: arg.Dtype = _WORKER.dtype,
    quantization: arg.Quantization = _WORKER.quantization,
    device: arg.Devices = _WORKER.device,
    load_format: arg.LoadFormat = _WORKER.load_format,
    max_model_len: arg.MaxModelLen = None,
    connector: arg.Connector = _WORKER.connector,
    block_size: arg.BlockSize = _WORKER.block_size,
    num_blocks: arg.NumBlocks = None,
    kv_cache_memory: arg.KvCacheMemory = None,
) -> None:
    """Find the settings with the highest goodput: start rings, measure them, and end in the time given.

    Prints the `baton up` to use. The defaults are measured beside the candidates, in turns.
    """
    check_writable("json", json)
    check_plot("plot", plot)
    search = SearchConfig(**given(ctx, SearchConfig))
    goals = parse_goals("goodput", goodput or ())
    if not goals:
        raise ConfigError("goodput", "is needed: say what a good answer is, as 'ttft:500 itl:50'")
    load = WorkloadConfig(**given(ctx, WorkloadConfig))
    # The rate is a placeholder: each probe has its own.
    offer = ServeConfig(workload=load, goals=goals, burstiness=burstiness, request_rate=1.0)
    searched = ("max_num_seqs", "max_num_batched_tokens", "prefill_chunk", "device")
    named, options = device.split(","), given(ctx, WorkerConfig, *searched)
    worker, *_ = [WorkerConfig(role="both", device=one, **options) for one in named]

    from baton.bench.offline.devices import all_devices
    from baton.cli.bench_ring import LocalRings
    from baton.cli.bench_sweep import run_sweep

    devices = all_devices() if named == ["auto"] else named
    run_sweep(search, LocalRings(worker, devices), offer, json, plot)
