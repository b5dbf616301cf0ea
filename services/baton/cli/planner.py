"""``baton planner``: its options."""

from __future__ import annotations

from typing import Annotated

import typer

from baton.cli import arguments as arg
from baton.cli.given import given
from baton.options import StartError

_TARGETS, _BOUNDS, _TIMES, _ACTING = "Targets", "Bounds", "Times", "Acting"


def planner(
    ctx: typer.Context,
    prometheus_url: Annotated[str, typer.Option(help="Where Baton's metrics are: http://HOST:PORT.")],
    ttft_target_ms: Annotated[
        float, typer.Option(metavar="MS", help="Time to the first token.", rich_help_panel=_TARGETS)
    ],
    itl_target_ms: Annotated[
        float,
        typer.Option(
            metavar="MS",
            help="Between two tokens; one in a hundred of an answer's may take longer.",
            rich_help_panel=_TARGETS,
        ),
    ],
    gpu_budget: Annotated[
        int, typer.Option(help="Most GPUs of all workers together.", rich_help_panel=_BOUNDS)
    ],
    attainment: Annotated[
        float,
        typer.Option(
            help="Share of requests that is to meet both targets. From 0.9 on, the more is kept for sudden "
            "bursts the higher it is.",
            rich_help_panel=_TARGETS,
        ),
    ] = 0.998,
    prefill_gpus: Annotated[
        int, typer.Option(help="GPUs of one prefill worker.", rich_help_panel=_BOUNDS)
    ] = 1,
    decode_gpus: Annotated[int, typer.Option(help="GPUs of one decode worker.", rich_help_panel=_BOUNDS)] = 1,
    min_prefill: Annotated[int, typer.Option(help="Fewest prefill workers.", rich_help_panel=_BOUNDS)] = 1,
    max_prefill: Annotated[int, typer.Option(help="Most prefill workers.", rich_help_panel=_BOUNDS)] = 64,
    min_decode: Annotated[int, typer.Option(help="Fewest decode workers.", rich_help_panel=_BOUNDS)] = 1,
    max_decode: Annotated[int, typer.Option(help="Most decode workers.", rich_help_panel=_BOUNDS)] = 64,
    start_seconds: Annotated[
        float,
        typer.Option(
            help="From asking for a pod until it serves: how far ahead to look.", rich_help_panel=_TIMES
        ),
    ] = 120.0,
    switch_seconds: Annotated[
        float,
        typer.Option(
            help="From asking a worker to change its role until it serves in it, its drain included.",
            rich_help_panel=_TIMES,
        ),
    ] = 30.0,
    settle_seconds: Annotated[
        float,
        typer.Option(
            help="For how long fewer workers must have been enough before there are fewer.",
            rich_help_panel=_TIMES,
        ),
    ] = 180.0,
    interval: Annotated[
        float, typer.Option(help="Seconds between decisions.", rich_help_panel=_TIMES)
    ] = 15.0,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Say what would be done, and why; do nothing.", rich_help_panel=_ACTING
        ),
    ] = False,
    switching: Annotated[
        bool, typer.Option(help="Have workers change roles.", rich_help_panel=_ACTING)
    ] = True,
    prefill_deployment: Annotated[
        str, typer.Option(help="Name of the prefill workers' Deployment.", rich_help_panel=_ACTING)
    ] = "baton-prefill",
    decode_deployment: Annotated[
        str, typer.Option(help="Name of the decode workers' Deployment.", rich_help_panel=_ACTING)
    ] = "baton-decode",
    prometheus_selector: Annotated[
        str | None,
        typer.Option(
            help='Label matchers of this ring\'s series. Default: namespace="...", the one of the workers.'
        ),
    ] = None,
    kubernetes_namespace: arg.KubernetesNamespace = None,
    kubernetes_selector: arg.KubernetesSelector = "baton.dev/role",
    kubernetes_port: arg.KubernetesPort = "grpc",
    kubeconfig: arg.Kubeconfig = None,
    kubernetes_context: arg.KubernetesContext = None,
    cluster_key: arg.ClusterKey = "",
    worker_tls_certfile: arg.WorkerTlsCertfile = None,
    worker_tls_keyfile: arg.WorkerTlsKeyfile = None,
    worker_tls_ca_certs: arg.WorkerTlsCaCerts = None,
    worker_tls_server_name: arg.WorkerTlsServerName = None,
    host: arg.Host = "127.0.0.1",
    metrics_port: arg.MetricsPort = 9200,
    log_level: arg.LogLevel = "info",
) -> int:
    """Size prefill and decode as one decision, from what the ring measures.

    Asks Prometheus, scales two Deployments, and has workers change roles where that is sooner than a new pod.
    One planner for a ring; no autoscaler beside it.
    """
    from baton.planner.config import PlannerConfig

    try:
        from baton.planner.main import run
    except ImportError:
        raise StartError(
            "baton planner needs the Kubernetes client: pip install 'baton[kubernetes]'"
        ) from None
    return run(PlannerConfig(**given(ctx, PlannerConfig)))
