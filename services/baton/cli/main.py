"""The ``baton`` command.

Each command imports what it runs when it runs, so that ``--help`` is instant and the router's process never
sees torch.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from typing import Annotated, NoReturn

import typer

from baton import __version__
from baton.cli import arguments as arg
from baton.cli.bench import bench
from baton.cli.completion import among
from baton.cli.derived import Given, OptionsOf, takes
from baton.cli.doctor import doctor
from baton.cli.keys import keys
from baton.cli.mistyped import message_of
from baton.cli.models import models
from baton.cli.planner import planner
from baton.cli.ring_options import WORKER_TLS, WORKERS, RingOptions, planned
from baton.cli.serve import ServeCommand, serve
from baton.cli.top import top
from baton.core.role import ROLES, Role, role_named
from baton.nodes.config import NodeConfig
from baton.process.common_options import MODEL
from baton.process.options import ConfigError, UserError
from baton.router.config import RouterConfig
from baton.simulated.config import SIMULATION, SIZES, SimulatedConfig
from baton.worker.config import WorkerConfig

commands = typer.Typer(
    name="baton",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    help="Serves large language models with prefill and decode in separate processes. "
    "`baton up` starts everything on this machine; the other commands start or use one part.",
)


def _version_asked(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit


@commands.callback()
def baton(
    asked: Annotated[
        bool,
        typer.Option("--version", help="Print Baton's version.", is_eager=True, callback=_version_asked),
    ] = False,
) -> None:
    """Take the options of no command."""


def app() -> None:
    """Run the command line. Errors of the person at the keyboard are one line, never a traceback."""
    try:
        status = commands(standalone_mode=False)
    except typer.TyperException as error:
        _fail(message_of(error), error.exit_code)
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
@takes(
    OptionsOf(WorkerConfig, only=("model",)),
    OptionsOf(RouterConfig, only=("served_model_name",)),
    replace(WORKERS, panel=MODEL),
    OptionsOf(
        RouterConfig,
        only=(
            *("host", "port", "grpc_port", "slo_ttft", "slo_itl", "vllm_metric_names"),
            *("tool_call_parser", "reasoning_parser", "generation_config"),
            *("disaggregation", "itl_target_ms", "no_prefill", "no_decode"),
            *("ui", "otlp_endpoint", "trace_sample"),
        ),
    ),
    WORKERS,
    OptionsOf(RingOptions),
)
def up(
    given: Given,
    prompt: Annotated[str | None, typer.Option(help="Ask this first and show the answer.")] = None,
    chat: arg.Chat = True,
) -> int:
    """Start a whole ring on this machine and keep it running.

    Starts the workers and a router as processes of their own, shows how far they are, and serves an
    OpenAI-compatible API when they are ready. A process that dies is started again. Ctrl-C stops everything.
    """
    from baton.cli.client import Question
    from baton.cli.fetching import with_files
    from baton.cli.up import UpOptions
    from baton.cli.up import up as run_up

    given = with_files(given, str(given.values["model"]))
    ring = planned(given)
    question = Question(prompt=prompt, chat=chat, temperature=0) if prompt is not None else None
    return run_up(ring, UpOptions(question, RingOptions(**given.fields(RingOptions)).shown_level))


def _worker_command(role: Role, what: str) -> None:
    """Register the command that starts one worker. The three differ in name and help only."""

    @takes(OptionsOf(WorkerConfig))
    def worker(given: Given, exit_with_parent: arg.ExitWithParent = None) -> None:
        _tie_to(exit_with_parent)
        _run_worker(WorkerConfig(role=role, **given.fields(WorkerConfig)))

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
@takes(OptionsOf(NodeConfig))
def node(given: Given, exit_with_parent: arg.ExitWithParent = None) -> int:
    """Lend this machine to a worker that leads elsewhere with --nodes, and end with it.

    The leader tells it what to load. In a pod of a LeaderWorkerSet, who leads is known from the environment.
    """
    _tie_to(exit_with_parent)
    from baton.nodes.node import run

    return run(NodeConfig(**given.fields(NodeConfig)))


@commands.command("worker-sim", rich_help_panel="One service")
@takes(
    *("role", "profile", "fault"),
    OptionsOf(SimulatedConfig),
    OptionsOf(
        WorkerConfig,
        only=(
            *("model", "served_model_name", "max_model_len", "host", "advertise", "port", "metrics_port"),
            *("vllm_metric_names", "data_port", "verify_handoff", "handoff_patience", "cluster_key"),
            "cluster_key_previous",
            *("block_size", "num_blocks", "kv_cache_memory", "max_num_seqs", "max_num_batched_tokens"),
            *("prefill_chunk", "mixed_prefill_tokens", "prefix_caching", "scheduling_policy"),
            *("priority_aging", "drain_timeout", "log_level"),
        ),
        help={
            "num_blocks": "KV blocks per worker. Default: 4096.",
            "mixed_prefill_tokens": "Most prompt tokens of a step that decodes as well: running answers wait "
            "for them. Default: no limit of its own.",
        },
        defaults=asdict(SIZES),
    ),
)
def worker_sim(
    given: Given,
    role: Annotated[Role, typer.Option(help="prefill, decode or both.", rich_help_panel=SIMULATION)] = "both",
    profile: Annotated[
        str,
        typer.Option(
            help="How fast it is: 8b-h100, 8b-l4, instant, or a JSON file.", rich_help_panel=SIMULATION
        ),
    ] = "8b-h100",
    fault: Annotated[
        list[str] | None,
        typer.Option(
            help="name=figure; give it once for each: die_mean_s, hang_mean_s, hang_s, slow_mean_s, slow_s, "
            "slow_factor, error_rate, seed.",
            rich_help_panel=SIMULATION,
        ),
    ] = None,
    exit_with_parent: arg.ExitWithParent = None,
) -> NoReturn:
    """Start a worker without a model: real protocols, scheduling and KV blocks, simulated steps.

    For trying out routers, charts and dashboards where there are no GPUs. Its answers are words without a
    meaning, in times that a profile gives.
    """
    _tie_to(exit_with_parent)
    from baton.process.ending import end_process
    from baton.process.start_clock import StartClock
    from baton.simulated.faults import parse_faults
    from baton.simulated.main import run
    from baton.simulated.profile import profile_of

    config = SimulatedConfig(
        worker=WorkerConfig(role=role, **given.fields(WorkerConfig)),
        profile=profile_of(profile),
        faults=parse_faults(fault or []),
        **given.fields(SimulatedConfig),
    )
    end_process(run(config, StartClock()))


@commands.command(rich_help_panel="One service")
@takes(OptionsOf(RouterConfig))
def router(given: Given, exit_with_parent: arg.ExitWithParent = None) -> None:
    """Start the front door: the HTTP and gRPC APIs, before workers that run elsewhere.

    It needs the model only for its tokenizer and chat template, and never loads torch.
    """
    _tie_to(exit_with_parent)
    _run_router(RouterConfig(**given.fields(RouterConfig)))


def _run_worker(config: WorkerConfig) -> NoReturn:
    from baton.process.start_clock import StartClock

    clock = StartClock()
    with clock.phase("import"):
        from baton.process.ending import end_process
        from baton.worker.start import run

    end_process(run(config, clock))


def _run_router(config: RouterConfig) -> NoReturn:
    from baton.process.ending import end_process
    from baton.router.main import run

    end_process(run(config))


def _tie_to(parent: int | None) -> None:
    if parent is not None:
        from baton.process.parent_death import exit_with_parent

        exit_with_parent(parent)


@commands.command(rich_help_panel="Use")
def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask.")],
    url: arg.Url = "http://127.0.0.1:8000",
    chat: arg.Chat = True,
    model: Annotated[str | None, typer.Option(help="Default: the model that the ring serves.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer. Default: the server's.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 always takes the likeliest token. Default: the model's.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed makes the same draws.")] = None,
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
@takes(OptionsOf(WorkerConfig, only=("cluster_key", "cluster_key_previous", *WORKER_TLS)))
def switch_role(
    given: Given,
    address: Annotated[str, typer.Argument(help="The worker: host:port of its gRPC server.")],
    role: Annotated[str, typer.Argument(help="prefill, decode or both.", autocompletion=among(ROLES))],
    timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="Longest time that the worker waits for its open requests; what is left then goes on "
            "elsewhere. 0: its own --drain-timeout.",
        ),
    ] = 0.0,
) -> None:
    """Have a running worker take another role: it drains, keeps its weights and KV blocks, and serves on."""
    import asyncio

    from baton.greeting.cluster_key import ClusterKeys
    from baton.net.certificates import TlsFiles
    from baton.net.channels import Dialer
    from baton.planner.switch_role import switch_role as switch

    wanted = role_named(role)
    if wanted is None:
        raise UserError(f"ROLE: must be one of {', '.join(ROLES)}, not {role!r}")
    known = given.fields(WorkerConfig)
    certificate, key, authority, name = (known.get(option) for option in WORKER_TLS)
    tls = TlsFiles.from_options("worker_tls", certificate, key, authority, mutual=True, server_name=name)
    cluster_key = known["cluster_key"]
    if not cluster_key:
        raise UserError("--cluster-key: is needed, as workers switch for nobody else (BATON_CLUSTER_KEY)")
    keys = ClusterKeys(cluster_key.encode(), known.get("cluster_key_previous", "").encode())
    done = asyncio.run(switch(address, wanted, keys, timeout_s=timeout, dialer=Dialer(tls)))
    print(f"{address}: was {done.was}, is {done.now}, after {done.seconds:.2f} s")


@commands.command(rich_help_panel="Use")
def version() -> None:
    """Print Baton's version."""
    print(f"baton {__version__} (Python {'.'.join(map(str, sys.version_info[:3]))})")


commands.command("serve", cls=ServeCommand, rich_help_panel="Run")(serve)
commands.command("models", rich_help_panel="Use")(models)
commands.command("doctor", rich_help_panel="Use")(doctor)
commands.command("top", rich_help_panel="Use")(top)
commands.command("planner", rich_help_panel="One service")(planner)
commands.add_typer(bench, rich_help_panel="Use")
commands.add_typer(keys, rich_help_panel="Use")
