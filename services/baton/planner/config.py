"""How the planner is set up. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from baton.options import LOG_LEVELS, ConfigError, check_choice, check_host, check_range
from baton.planner.goals import Bounds, Targets, Times
from baton.router.discovery.slices import ROLE_LABEL
from baton.tls.files import TlsFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerConfig:
    """One planner process. Raises ConfigError when a value cannot work."""

    prometheus_url: str
    prometheus_selector: str | None = None
    """Label matchers of the ring's series, such as ``namespace="serving"``; None: those of the namespace."""
    ttft_target_ms: float
    itl_target_ms: float
    attainment: float = 0.998
    gpu_budget: int
    prefill_gpus: int = 1
    decode_gpus: int = 1
    min_prefill: int = 1
    max_prefill: int = 64
    min_decode: int = 1
    max_decode: int = 64
    start_seconds: float = 120.0
    switch_seconds: float = 30.0
    settle_seconds: float = 180.0
    interval: float = 15.0  # seconds
    switching: bool = True
    dry_run: bool = False
    prefill_deployment: str = "baton-prefill"
    decode_deployment: str = "baton-decode"
    kubernetes_namespace: str | None = None  # None: that of this pod, else "default"
    kubernetes_selector: str = ROLE_LABEL
    kubernetes_port: str = "grpc"
    kubeconfig: str | None = None
    kubernetes_context: str | None = None
    cluster_key: str = field(default="", repr=False)
    worker_tls_certfile: str | None = None
    worker_tls_keyfile: str | None = None
    worker_tls_ca_certs: str | None = None
    worker_tls_server_name: str | None = None
    host: str = "127.0.0.1"
    metrics_port: int = 9200
    log_level: str = "info"

    def __post_init__(self) -> None:
        url = urlsplit(self.prometheus_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ConfigError(
                "prometheus_url", f"must be http:// or https:// with a host, not {self.prometheus_url!r}"
            )
        if self.prometheus_selector is not None and not self.prometheus_selector.strip():
            raise ConfigError("prometheus_selector", 'must be label matchers, such as namespace="serving"')
        for name in ("ttft_target_ms", "itl_target_ms", "start_seconds", "switch_seconds", "settle_seconds"):
            if not getattr(self, name) > 0:
                raise ConfigError(name, f"must be more than 0, not {getattr(self, name):g}")
        check_range("interval", self.interval, 1, 600)
        check_host("host", self.host)
        check_range("metrics_port", self.metrics_port, -1, 65535)
        check_choice("log_level", self.log_level, LOG_LEVELS)
        for name in ("prefill_deployment", "decode_deployment"):
            if not getattr(self, name):
                raise ConfigError(name, "must not be empty")
        _ = self.targets, self.bounds, self.times, self.worker_tls  # each refuses what cannot work

    @property
    def targets(self) -> Targets:
        return Targets(
            ttft_s=self.ttft_target_ms / 1e3, itl_s=self.itl_target_ms / 1e3, attainment=self.attainment
        )

    @property
    def bounds(self) -> Bounds:
        return Bounds(
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
        return TlsFiles.given(
            "worker_tls",
            self.worker_tls_certfile,
            self.worker_tls_keyfile,
            self.worker_tls_ca_certs,
            mutual=True,
            server_name=self.worker_tls_server_name,
        )
