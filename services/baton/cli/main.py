"""The ``baton`` command.

Each command imports what it runs when it runs, so that ``--help`` is instant and the router's process never
sees torch.
"""

from __future__ import annotations

import logging
import sys
from typing import Annotated, NoReturn

import typer

from baton import __version__
from baton.cli import arguments as arg
from baton.cli.bench import bench
from baton.cli.given import given
from baton.cli.keys import keys
from baton.cli.planner import planner
from baton.nodes.config import JOIN_TIMEOUT_S, NODE_PORT, NodeConfig
from baton.options import LOG_LEVELS, ConfigError, UserError, check_choice, loopback_beside
from baton.router.config import RouterConfig
from baton.worker.config import ROLES, RoleName, WorkerConfig

_WORKER = WorkerConfig(role="both")  # for its defaults
_ROUTER = RouterConfig(workers=("127.0.0.1:1",))

commands = typer.Typer(
    name="baton",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    help="Serves large language models with prefill and decode in separate processes. "
    "`baton up` starts everything on this machine; the other commands start or use one part.",
)


def app() -> None:
    """Run the command line. Errors of the person at the keyboard are one line, never a traceback."""
    try:
        status = commands(standalone_mode=False)
    except typer.TyperException as error:
        _fail(error.format_message(), error.exit_code)
    except ConfigError as error:
        _fail(str(error), 2)
    except UserError as error:
        _fail(str(error), 1)
    except (typer.Abort, KeyboardInterrupt):
        status = 130
    sys.exit(status or 0)


def _fail(message: str, status: int) -> None:
    if message:  # empty after the help that a call without a command prints
        print(f"error: {message}", file=sys.stderr)
    sys.exit(status)


@commands.command(rich_help_panel="Run")
def up(
    ctx: typer.Context,
    prompt: Annotated[str | None, typer.Option(help="Ask this first and show the answer.")] = None,
    prefill: Annotated[int | None, typer.Option(help="Prefill workers. Default 1.")] = None,
    decode: Annotated[int | None, typer.Option(help="Decode workers. Default 1.")] = None,
    both: Annotated[int, typer.Option(help="Workers that do both; then the others default to 0.")] = 0,
    model: arg.Model = _WORKER.model,
    served_model_name: arg.ServedModelNames = None,
    dtype: arg.Dtype = _WORKER.dtype,
    quantization: arg.Quantization = _WORKER.quantization,
    device: arg.Devices = _WORKER.device,
    load_format: arg.LoadFormat = _WORKER.load_format,
    max_model_len: arg.MaxModelLen = None,
    host: arg.Host = _ROUTER.host,
    port: arg.HttpPort = _ROUTER.port,
    grpc_port: arg.GrpcPort = _ROUTER.grpc_port,
    slo_ttft: arg.SloTtft = None,
    slo_itl: arg.SloItl = None,
    vllm_metric_names: arg.VllmMetricNames = False,
    tool_call_parser: arg.ToolCallParser = _ROUTER.tool_call_parser,
    reasoning_parser: arg.ReasoningParser = _ROUTER.reasoning_parser,
    generation_config: arg.GenerationConfig = _ROUTER.generation_config,
    disaggregation: arg.Disaggregation = _ROUTER.disaggregation,
    itl_target_ms: arg.ItlTargetMs = None,
    no_prefill: arg.NoPrefill = _ROUTER.no_prefill,
    no_decode: arg.NoDecode = _ROUTER.no_decode,
    ui: arg.Ui = True,
    otlp_endpoint: arg.OtlpEndpoint = None,
    trace_sample: arg.TraceSample = _ROUTER.trace_sample,
    connector: arg.Connector = _WORKER.connector,
    verify_handoff: arg.VerifyHandoff = False,
    block_size: arg.BlockSize = _WORKER.block_size,
    num_blocks: arg.NumBlocks = None,
    kv_cache_memory: arg.KvCacheMemory = None,
    host_kv_memory: arg.HostKvMemory = _WORKER.host_kv_memory,
    max_num_seqs: arg.MaxNumSeqs = _WORKER.max_num_seqs,
    max_num_batched_tokens: arg.MaxNumBatchedTokens = _WORKER.max_num_batched_tokens,
    prefill_chunk: arg.PrefillChunk = _WORKER.prefill_chunk,
    mixed_prefill_tokens: arg.MixedPrefillTokens = None,
    chunked_prefill: arg.ChunkedPrefill = True,
    prefix_caching: arg.PrefixCaching = True,
    enforce_eager: arg.EnforceEager = False,
    scheduling_policy: arg.SchedulingPolicy = _WORKER.scheduling_policy,
    priority_aging: arg.PriorityAging = _WORKER.priority_aging,
    speculative_method: arg.SpeculativeMethod = _WORKER.speculative_method,
    speculative_model: arg.SpeculativeModel = None,
    num_speculative_tokens: arg.NumSpeculativeTokens = _WORKER.num_speculative_tokens,
    speculative_ngram_min: arg.SpeculativeNgramMin = _WORKER.speculative_ngram_min,
    speculative_ngram_max: arg.SpeculativeNgramMax = _WORKER.speculative_ngram_max,
    tensor_parallel_size: arg.TensorParallelSize = _WORKER.tensor_parallel_size,
    pipeline_parallel_size: arg.PipelineParallelSize = _WORKER.pipeline_parallel_size,
    prefill_tensor_parallel_size: arg.PrefillTensorParallelSize = None,
    prefill_pipeline_parallel_size: arg.PrefillPipelineParallelSize = None,
    decode_tensor_parallel_size: arg.DecodeTensorParallelSize = None,
    decode_pipeline_parallel_size: arg.DecodePipelineParallelSize = None,
    threads_per_worker: arg.ThreadsPerWorker = None,
    log_level: arg.UpLogLevel = "warning",
    chat: arg.Chat = True,
) -> int:
    """Start a whole ring on this machine and keep it running.

    Starts the workers and a router as processes of their own, shows how far they are, and serves an
    OpenAI-compatible API when they are ready. A process that dies is started again. Ctrl-C stops everything.
    """
    from baton.cli import ring
    from baton.cli.client import Question
    from baton.cli.up import UpOptions
    from baton.cli.up import up as run_up

    check_choice("log_level", log_level, LOG_LEVELS)
    devices = device.split(",")
    names = tuple(served_model_name or ())
    pattern = given(ctx, WorkerConfig, "host", "port", "device", "log_level", "served_model_name")
    pattern["served_model_name"] = names[0] if names else None
    inside = loopback_beside(host)
    worker = WorkerConfig(role="both", host=inside, device=devices[0], threads=threads_per_worker, **pattern)
    roles = ring.roles_wanted(prefill, decode, both)
    own: dict[RoleName, WorkerConfig] = {
        "prefill": ring.with_ranks(
            worker, "prefill", prefill_tensor_parallel_size, prefill_pipeline_parallel_size
        ),
        "decode": ring.with_ranks(
            worker, "decode", decode_tensor_parallel_size, decode_pipeline_parallel_size
        ),
    }
    routing = {**given(ctx, RouterConfig, "log_level"), "served_model_name": names}
    planned = ring.plan(worker, roles, devices, routing, own)
    question = Question(prompt=prompt, chat=chat, temperature=0) if prompt is not None else None
    return run_up(planned, UpOptions(question, logging.getLevelNamesMapping()[log_level.upper()]))


def _worker_command(role: RoleName, what: str) -> None:
    """Register the command that starts one worker. The three differ in name and help only."""

    def worker(
        ctx: typer.Context,
        model: arg.Model = _WORKER.model,
        served_model_name: arg.ServedModelName = None,
        dtype: arg.Dtype = _WORKER.dtype,
        quantization: arg.Quantization = _WORKER.quantization,
        device: arg.Device = _WORKER.device,
        load_format: arg.LoadFormat = _WORKER.load_format,
        max_model_len: arg.MaxModelLen = None,
        host: arg.Host = _WORKER.host,
        advertise: arg.Advertise = None,
        port: arg.WorkerPort = _WORKER.port,
        metrics_port: arg.MetricsPort = _WORKER.metrics_port,
        vllm_metric_names: arg.VllmMetricNames = False,
        data_port: arg.DataPort = _WORKER.data_port,
        connector: arg.Connector = _WORKER.connector,
        verify_handoff: arg.VerifyHandoff = False,
        handoff_patience: arg.HandoffPatience = _WORKER.handoff_patience,
        cluster_key: arg.ClusterKey = "",
        worker_tls_certfile: arg.WorkerTlsCertfile = None,
        worker_tls_keyfile: arg.WorkerTlsKeyfile = None,
        worker_tls_ca_certs: arg.WorkerTlsCaCerts = None,
        worker_tls_server_name: arg.WorkerTlsServerName = None,
        block_size: arg.BlockSize = _WORKER.block_size,
        num_blocks: arg.NumBlocks = None,
        kv_cache_memory: arg.KvCacheMemory = None,
        host_kv_memory: arg.HostKvMemory = _WORKER.host_kv_memory,
        max_num_seqs: arg.MaxNumSeqs = _WORKER.max_num_seqs,
        max_num_batched_tokens: arg.MaxNumBatchedTokens = _WORKER.max_num_batched_tokens,
        prefill_chunk: arg.PrefillChunk = _WORKER.prefill_chunk,
        mixed_prefill_tokens: arg.MixedPrefillTokens = None,
        chunked_prefill: arg.ChunkedPrefill = True,
        prefix_caching: arg.PrefixCaching = True,
        enforce_eager: arg.EnforceEager = False,
        scheduling_policy: arg.SchedulingPolicy = _WORKER.scheduling_policy,
        priority_aging: arg.PriorityAging = _WORKER.priority_aging,
        speculative_method: arg.SpeculativeMethod = _WORKER.speculative_method,
        speculative_model: arg.SpeculativeModel = None,
        num_speculative_tokens: arg.NumSpeculativeTokens = _WORKER.num_speculative_tokens,
        speculative_ngram_min: arg.SpeculativeNgramMin = _WORKER.speculative_ngram_min,
        speculative_ngram_max: arg.SpeculativeNgramMax = _WORKER.speculative_ngram_max,
        tensor_parallel_size: arg.TensorParallelSize = _WORKER.tensor_parallel_size,
        pipeline_parallel_size: arg.PipelineParallelSize = _WORKER.pipeline_parallel_size,
        nodes: arg.Nodes = _WORKER.nodes,
        node_port: arg.NodePort = _WORKER.node_port,
        join_timeout: arg.JoinTimeout = _WORKER.join_timeout,
        threads: arg.Threads = None,
        drain_timeout: arg.DrainTimeout = None,
        log_level: arg.LogLevel = _WORKER.log_level,
        exit_with_parent: arg.ExitWithParent = None,
    ) -> None:
        _tie_to(exit_with_parent)
        config = WorkerConfig(role=role, **given(ctx, WorkerConfig))
        _run_worker(config)

    commands.command(role, help=what, rich_help_panel="One service")(worker)


_worker_command(
    "prefill",
    "Start a worker that reads prompts and hands their KV blocks to a decode worker.\n\n"
    "Prints a line BATON_READY with its addresses on standard output when it can be used.",
)
_worker_command(
    "decode",
    "Start a worker that takes KV blocks over and writes answers.\n\n"
    "Prints a line BATON_READY with its addresses on standard output when it can be used.",
)
_worker_command(
    "both",
    "Start a worker that reads prompts and writes the answers itself.\n\n"
    "Prints a line BATON_READY with its addresses on standard output when it can be used.",
)


@commands.command(rich_help_panel="One service")
def node(
    ctx: typer.Context,
    leader_address: arg.LeaderAddress,
    nodes: arg.NodesOfGroup,
    node_index: arg.NodeIndex,
    node_port: arg.NodePort = NODE_PORT,
    join_timeout: arg.JoinTimeout = JOIN_TIMEOUT_S,
    host: arg.Host = "127.0.0.1",
    advertise: arg.Advertise = None,
    health_port: arg.HealthPort = -1,
    cluster_key: arg.ClusterKey = "",
    log_level: arg.LogLevel = _WORKER.log_level,
    exit_with_parent: arg.ExitWithParent = None,
) -> int:
    """Lend this machine to a worker that leads elsewhere with --nodes, and end with it.

    The leader tells it what to load. In a pod of a LeaderWorkerSet, who leads is known from the environment.
    """
    _tie_to(exit_with_parent)
    from baton.nodes.node import run

    return run(NodeConfig(**given(ctx, NodeConfig)))


@commands.command("worker-sim", rich_help_panel="One service")
def worker_sim(
    ctx: typer.Context,
    role: arg.SimulatedRole = "both",
    profile: arg.Profile = "8b-h100",
    fault: arg.Faults = None,
    revision: arg.SimulatedRevision = None,
    http_port: arg.SimulatedHttpPort = -1,
    record: arg.RecordFile = None,
    model: arg.Model = _WORKER.model,
    served_model_name: arg.ServedModelName = None,
    max_model_len: arg.MaxModelLen = None,
    host: arg.Host = _WORKER.host,
    advertise: arg.Advertise = None,
    port: arg.WorkerPort = _WORKER.port,
    metrics_port: arg.MetricsPort = _WORKER.metrics_port,
    vllm_metric_names: arg.VllmMetricNames = False,
    data_port: arg.DataPort = _WORKER.data_port,
    verify_handoff: arg.VerifyHandoff = False,
    handoff_patience: arg.HandoffPatience = _WORKER.handoff_patience,
    cluster_key: arg.ClusterKey = "",
    block_size: arg.BlockSize = _WORKER.block_size,
    num_blocks: arg.SimulatedNumBlocks = None,
    kv_cache_memory: arg.KvCacheMemory = None,
    max_num_seqs: arg.MaxNumSeqs = 256,
    max_num_batched_tokens: arg.MaxNumBatchedTokens = 2048,
    prefill_chunk: arg.PrefillChunk = 2048,
    mixed_prefill_tokens: arg.SimulatedMixedPrefillTokens = None,
    prefix_caching: arg.PrefixCaching = True,
    scheduling_policy: arg.SchedulingPolicy = _WORKER.scheduling_policy,
    priority_aging: arg.PriorityAging = _WORKER.priority_aging,
    drain_timeout: arg.DrainTimeout = None,
    log_level: arg.LogLevel = _WORKER.log_level,
    exit_with_parent: arg.ExitWithParent = None,
) -> NoReturn:
    """Start a worker without a model: real protocols, scheduling and KV blocks, simulated steps.

    For trying out routers, charts and dashboards where there are no GPUs. Its answers are words without a
    meaning, in times that a profile gives.
    """
    _tie_to(exit_with_parent)
    from baton.simulated.config import SimulatedConfig
    from baton.simulated.faults import parse_faults
    from baton.simulated.main import run
    from baton.simulated.profile import profile_of
    from baton.telemetry.startup import StartClock
    from baton.worker.main import end_process

    config = SimulatedConfig(
        worker=WorkerConfig(**given(ctx, WorkerConfig)),
        profile=profile_of(profile),
        faults=parse_faults(fault or []),
        revision=revision,
        http_port=http_port,
        record=record,
    )
    end_process(run(config, StartClock()))


@commands.command(rich_help_panel="One service")
def router(
    ctx: typer.Context,
    workers: arg.Workers = None,
    discovery: arg.Discovery = _ROUTER.discovery,
    kubernetes_namespace: arg.KubernetesNamespace = None,
    kubernetes_selector: arg.KubernetesSelector = _ROUTER.kubernetes_selector,
    kubernetes_port: arg.KubernetesPort = _ROUTER.kubernetes_port,
    kubeconfig: arg.Kubeconfig = None,
    kubernetes_context: arg.KubernetesContext = None,
    discovery_max_staleness: arg.DiscoveryMaxStaleness = _ROUTER.discovery_max_staleness,
    redis_url: arg.RedisUrl = None,
    redis_password_file: arg.RedisPasswordFile = None,
    redis_timeout_ms: arg.RedisTimeoutMs = _ROUTER.redis_timeout_ms,
    limit_requests_per_minute: arg.LimitRequestsPerMinute = None,
    limit_tokens_per_minute: arg.LimitTokensPerMinute = None,
    limit_concurrent_requests: arg.LimitConcurrentRequests = None,
    limit_tokens_per_day: arg.LimitTokensPerDay = None,
    api_keys: arg.ApiKeys = None,
    ssl_certfile: arg.SslCertfile = None,
    ssl_keyfile: arg.SslKeyfile = None,
    ssl_ca_certs: arg.SslCaCerts = None,
    ssl_client_auth: arg.SslClientAuth = _ROUTER.ssl_client_auth,
    worker_tls_certfile: arg.WorkerTlsCertfile = None,
    worker_tls_keyfile: arg.WorkerTlsKeyfile = None,
    worker_tls_ca_certs: arg.WorkerTlsCaCerts = None,
    worker_tls_server_name: arg.WorkerTlsServerName = None,
    audit_log: arg.AuditLog = None,
    audit_log_required: arg.AuditLogRequired = False,
    log_prompts: arg.LogPrompts = False,
    ui: arg.Ui = True,
    trace_requests: arg.TraceRequests = _ROUTER.trace_requests,
    trace_memory: arg.TraceMemory = _ROUTER.trace_memory,
    otlp_endpoint: arg.OtlpEndpoint = None,
    trace_sample: arg.TraceSample = _ROUTER.trace_sample,
    max_inflight: arg.MaxInflight = None,
    queue_size: arg.QueueSize = _ROUTER.queue_size,
    queue_tokens: arg.QueueTokens = _ROUTER.queue_tokens,
    max_queue_wait: arg.MaxQueueWait = _ROUTER.max_queue_wait,
    max_stream_backlog: arg.MaxStreamBacklog = _ROUTER.max_stream_backlog,
    slow_client_timeout: arg.SlowClientTimeout = _ROUTER.slow_client_timeout,
    model: arg.Model = _ROUTER.model,
    served_model_name: arg.ServedModelNames = None,
    models: arg.Models = None,
    host: arg.Host = _ROUTER.host,
    port: arg.HttpPort = _ROUTER.port,
    grpc_port: arg.GrpcPort = _ROUTER.grpc_port,
    processes: arg.Processes = _ROUTER.processes,
    allowed_origins: arg.AllowedOrigins = None,
    allow_credentials: arg.AllowCredentials = _ROUTER.allow_credentials,
    allowed_methods: arg.AllowedMethods = None,
    allowed_headers: arg.AllowedHeaders = None,
    cluster_key: arg.ClusterKey = "",
    max_body_bytes: arg.MaxBodyBytes = _ROUTER.max_body_bytes,
    max_n: arg.MaxN = _ROUTER.max_n,
    max_stop_strings: arg.MaxStopStrings = _ROUTER.max_stop_strings,
    max_attempts: arg.MaxAttempts = _ROUTER.max_attempts,
    queue_timeout: arg.QueueTimeout = _ROUTER.queue_timeout,
    slo_ttft: arg.SloTtft = None,
    slo_itl: arg.SloItl = None,
    vllm_metric_names: arg.VllmMetricNames = False,
    tool_call_parser: arg.ToolCallParser = _ROUTER.tool_call_parser,
    reasoning_parser: arg.ReasoningParser = _ROUTER.reasoning_parser,
    generation_config: arg.GenerationConfig = _ROUTER.generation_config,
    disaggregation: arg.Disaggregation = _ROUTER.disaggregation,
    itl_target_ms: arg.ItlTargetMs = None,
    no_prefill: arg.NoPrefill = _ROUTER.no_prefill,
    no_decode: arg.NoDecode = _ROUTER.no_decode,
    drain_timeout: arg.RouterDrainTimeout = _ROUTER.drain_timeout,
    log_level: arg.LogLevel = _ROUTER.log_level,
    exit_with_parent: arg.ExitWithParent = None,
) -> int:
    """Start the front door: the HTTP and gRPC APIs, before workers that run elsewhere.

    It needs the model only for its tokenizer and chat template, and never loads torch.
    """
    _tie_to(exit_with_parent)
    lists = {
        "workers": workers,
        "served_model_name": served_model_name,
        "allowed_origins": allowed_origins,
        "allowed_methods": allowed_methods,
        "allowed_headers": allowed_headers,
    }
    several = {name: tuple(values) for name, values in lists.items() if values}
    return _run_router(RouterConfig(**{**given(ctx, RouterConfig, *lists), **several}))


def _run_worker(config: WorkerConfig) -> NoReturn:
    from baton.telemetry.startup import StartClock

    clock = StartClock()
    with clock.phase("import"):
        from baton.worker.load import run
        from baton.worker.main import end_process

    end_process(run(config, clock))


def _run_router(config: RouterConfig) -> int:
    from baton.router.main import run

    return run(config)


def _tie_to(parent: int | None) -> None:
    if parent is not None:
        from baton.parent import exit_with_parent

        exit_with_parent(parent)


@commands.command(rich_help_panel="Use")
def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask.")],
    url: arg.Url = "http://127.0.0.1:8000",
    chat: arg.Chat = True,
    model: Annotated[str | None, typer.Option(help="Default: the model that the ring serves.")] = None,
    max_tokens: arg.MaxTokens = None,
    temperature: arg.Temperature = None,
    seed: arg.Seed = None,
    api_key: arg.ApiKey = None,
) -> None:
    """Ask a running ring and stream its answer to standard output."""
    from baton.cli.client import Question, ask

    question = Question(
        prompt=prompt, chat=chat, model=model, max_tokens=max_tokens, temperature=temperature, seed=seed
    )
    for piece in ask(url, question, api_key):
        print(piece.text, end="", flush=True)
    print()


@commands.command(rich_help_panel="Use")
def explain(
    request_id: Annotated[
        str | None,
        typer.Argument(
            help="The id of an answer, what its header x-baton-request-id says, or the client's own "
            "x-request-id. Default: list the latest requests."
        ),
    ] = None,
    url: arg.Url = "http://127.0.0.1:8000",
    limit: Annotated[int, typer.Option(help="Requests to list, where none is named.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="As the router tells it.")] = False,
    api_key: arg.ApiKey = None,
) -> None:
    """Say where the time of a request went, and why it went where it did."""
    from baton.cli.explain import explain as run_explain

    print(run_explain(url, request_id, limit=limit, as_json=as_json, api_key=api_key))


@commands.command("switch-role", rich_help_panel="Use")
def switch_role(
    address: Annotated[str, typer.Argument(help="The worker: host:port of its gRPC server.")],
    role: Annotated[str, typer.Argument(help="prefill, decode or both.")],
    timeout: arg.SwitchTimeout = 0.0,
    cluster_key: arg.ClusterKey = "",
    worker_tls_certfile: arg.WorkerTlsCertfile = None,
    worker_tls_keyfile: arg.WorkerTlsKeyfile = None,
    worker_tls_ca_certs: arg.WorkerTlsCaCerts = None,
    worker_tls_server_name: arg.WorkerTlsServerName = None,
) -> None:
    """Have a running worker take another role: it drains, keeps its weights and KV blocks, and serves on."""
    import asyncio

    from baton.switching import switch_role as switch
    from baton.tls.channels import Dialer
    from baton.tls.files import TlsFiles

    if role not in ROLES:
        raise UserError(f"ROLE: must be one of {', '.join(ROLES)}, not {role!r}")
    tls = TlsFiles.given(
        "worker_tls",
        worker_tls_certfile,
        worker_tls_keyfile,
        worker_tls_ca_certs,
        mutual=True,
        server_name=worker_tls_server_name,
    )
    done = asyncio.run(switch(address, role, cluster_key.encode(), timeout_s=timeout, dialer=Dialer(tls)))
    print(f"{address}: was {done.was}, is {done.now}, after {done.seconds:.2f} s")


@commands.command(rich_help_panel="Use")
def version() -> None:
    """Print Baton's version."""
    print(f"baton {__version__} (Python {'.'.join(map(str, sys.version_info[:3]))})")


commands.command("planner", rich_help_panel="One service")(planner)
commands.add_typer(bench, rich_help_panel="Use")
commands.add_typer(keys, rich_help_panel="Use")
