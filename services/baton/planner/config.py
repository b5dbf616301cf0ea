"""How the planner is set up. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated
from urllib.parse import urlsplit

from baton.greeting.cluster_key import HOW, MIN_BYTES, ClusterKeys, check_previous_key, suffices
from baton.net.certificates import TlsFiles
from baton.planner.goals import LatencyTargets, PlanBounds, Times
from baton.process.common_options import (
    ClusterKey,
    ClusterKeyPrevious,
    Host,
    LogLevel,
    MetricsPort,
    WorkerTlsCaCerts,
    WorkerTlsCertfile,
    WorkerTlsKeyfile,
    WorkerTlsServerName,
)
from baton.process.fields import Option, check_options
from baton.process.options import ConfigError, check_filled
from baton.router.discovery.kubernetes_options import (
    Kubeconfig,
    KubernetesContext,
    KubernetesNamespace,
    KubernetesPort,
    KubernetesSelector,
)
from baton.router.discovery.slices import ROLE_LABEL

_TARGETS, _BOUNDS, _TIMES, _ACTING = "Targets", "Bounds", "Times", "Acting"


def _check_prometheus_url(option: str, text: str) -> None:
    url = urlsplit(text)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError(option, f"must be http:// or https:// with a host, not {text!r}")


def _check_matchers(option: str, text: str) -> None:
    if not text.strip():
        raise ConfigError(option, 'must be label matchers, such as namespace="serving"')


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerConfig:
    """One planner process. Raises ConfigError when a value cannot work."""

    prometheus_url: Annotated[
        str, Option("Where Baton's metrics are: http://HOST:PORT.", check=_check_prometheus_url)
    ]
    ttft_target_ms: Annotated[float, Option("Time to the first token.", _TARGETS, metavar="MS")]
    itl_target_ms: Annotated[
        float,
        Option(
            "Between two tokens; one in a hundred of an answer's may take longer.", _TARGETS, metavar="MS"
        ),
    ]
    gpu_budget: Annotated[int, Option("Most GPUs of all workers together.", _BOUNDS)]
    attainment: Annotated[
        float,
        Option(
            "Share of requests that is to meet both targets. From 0.9 on, the more is kept for sudden "
            "bursts the higher it is.",
            _TARGETS,
        ),
    ] = 0.998
    prefill_gpus: Annotated[int, Option("GPUs of one prefill worker.", _BOUNDS)] = 1
    decode_gpus: Annotated[int, Option("GPUs of one decode worker.", _BOUNDS)] = 1
    min_prefill: Annotated[int, Option("Fewest prefill workers.", _BOUNDS)] = 1
    max_prefill: Annotated[int, Option("Most prefill workers.", _BOUNDS)] = 64
    min_decode: Annotated[int, Option("Fewest decode workers.", _BOUNDS)] = 1
    max_decode: Annotated[int, Option("Most decode workers.", _BOUNDS)] = 64
    start_seconds: Annotated[
        float, Option("From asking for a pod until it serves: how far ahead to look.", _TIMES)
    ] = 120.0
    switch_seconds: Annotated[
        float,
        Option("From asking a worker to change its role until it serves in it, its drain included.", _TIMES),
    ] = 30.0
    settle_seconds: Annotated[
        float,
        Option("For how long fewer workers must have been enough before there are fewer.", _TIMES),
    ] = 180.0
    interval: Annotated[float, Option("Seconds between decisions.", _TIMES, least=1, most=600)] = 15.0
    dry_run: Annotated[bool, Option("Say what would be done, and why; do nothing.", _ACTING)] = False
    switching: Annotated[bool, Option("Have workers change roles.", _ACTING)] = True
    prefill_deployment: Annotated[
        str, Option("Name of the prefill workers' Deployment.", _ACTING, check=check_filled)
    ] = "baton-prefill"
    decode_deployment: Annotated[
        str, Option("Name of the decode workers' Deployment.", _ACTING, check=check_filled)
    ] = "baton-decode"
    prometheus_selector: Annotated[
        str | None,
        Option(
            'Label matchers of this ring\'s series. Default: namespace="...", the one of the workers.',
            check=_check_matchers,
        ),
    ] = None
    kubernetes_namespace: KubernetesNamespace = None
    kubernetes_selector: KubernetesSelector = ROLE_LABEL
    kubernetes_port: KubernetesPort = "grpc"
    kubeconfig: Kubeconfig = None
    kubernetes_context: KubernetesContext = None
    cluster_key: ClusterKey = field(default="", repr=False)
    cluster_key_previous: ClusterKeyPrevious = field(default="", repr=False)
    worker_tls_certfile: WorkerTlsCertfile = None
    worker_tls_keyfile: WorkerTlsKeyfile = None
    worker_tls_ca_certs: WorkerTlsCaCerts = None
    worker_tls_server_name: WorkerTlsServerName = None
    host: Host = "127.0.0.1"
    metrics_port: MetricsPort = 9200
    log_level: LogLevel = "info"

    def __post_init__(self) -> None:
        check_options(self)
        for name in ("ttft_target_ms", "itl_target_ms", "start_seconds", "switch_seconds", "settle_seconds"):
            if not getattr(self, name) > 0:
                raise ConfigError(name, f"must be more than 0, not {getattr(self, name):g}")
        _ = self.targets, self.bounds, self.times, self.worker_tls  # each refuses what cannot work
        if self.switching and not self.dry_run and not suffices(self.cluster_key):
            raise ConfigError(
                "cluster_key",
                f"must have at least {MIN_BYTES} bytes, as workers switch for no other: {HOW}",
            )
        check_previous_key(self.cluster_key, self.cluster_key_previous)

    @property
    def cluster_keys(self) -> ClusterKeys:
        """The keys by which other services are known."""
        return ClusterKeys(self.cluster_key.encode(), self.cluster_key_previous.encode())

    @property
    def targets(self) -> LatencyTargets:
        return LatencyTargets(
            ttft_s=self.ttft_target_ms / 1e3, itl_s=self.itl_target_ms / 1e3, attainment=self.attainment
        )

    @property
    def bounds(self) -> PlanBounds:
        return PlanBounds(
            gpu_budget=self.gpu_budget,
            prefill_gpus=self.prefill_gpus,
            decode_gpus=self.decode_gpus,
            min_prefill=self.min_prefill,
            max_prefill=self.max_prefill,
            min_decode=self.min_decode,
            max_decode=self.max_decode,
        )

    @property
    def times(self) -> Times:
        return Times(
            start_s=self.start_seconds,
            switch_s=self.switch_seconds,
            settle_s=self.settle_seconds,
            stale_s=max(60.0, 3 * self.interval),
        )

    @property
    def worker_tls(self) -> TlsFiles | None:
        return TlsFiles.from_options(
            "worker_tls",
            self.worker_tls_certfile,
            self.worker_tls_keyfile,
            self.worker_tls_ca_certs,
            mutual=True,
            server_name=self.worker_tls_server_name,
        )
