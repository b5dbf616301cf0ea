"""How the router is set up. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from baton import options
from baton.options import LOG_LEVELS, ConfigError, check_choice, check_host, check_range
from baton.request.defaults import GENERATION_CONFIGS
from baton.request.limits import MAX_ANSWERS
from baton.router.discovery.slices import ROLE_LABEL
from baton.router.placement import (
    DISAGGREGATIONS,
    NO_DECODE,
    NO_PREFILL,
    Disaggregation,
    NoDecode,
    NoPrefill,
    PlacementOptions,
)
from baton.router.shared.limits import Limits
from baton.router.shared.redis_store import check_url
from baton.telemetry.goodput import Targets
from baton.tls.files import CLIENT_AUTHS, ClientAuth, TlsFiles
from baton.tools.formats import REASONING_PARSERS, TOOL_PARSERS

DISCOVERIES = ("static", "kubernetes")
MOST_PROCESSES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """One router. Raises ConfigError when a value cannot work.

    A port of 0 is picked by the system and told in the ready line; a gRPC port of -1 serves no gRPC.
    """

    workers: tuple[str, ...] = ()  # host:port of each worker's gRPC server
    discovery: str = "static"
    kubernetes_namespace: str | None = None  # None: that of this pod, else "default"
    kubernetes_selector: str = ROLE_LABEL
    kubernetes_port: str = "grpc"  # name of the workers' gRPC port in their Service
    kubeconfig: str | None = None  # None: the service account of this pod, else the usual file
    kubernetes_context: str | None = None
    discovery_max_staleness: float = 300.0  # seconds; 0: no bound
    model: str = "demo"  # whose tokenizer and chat template to use
    served_model_name: tuple[str, ...] = ()
    """The first is the model's name, the others are aliases; none: that of the directory, or ``model``."""
    models: str | None = None
    """A file that names several models; each has a configuration of its own: `baton.router.models`."""
    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int = 8001
    processes: int = 1  # that share the ports
    redis_url: str | None = field(default=None, repr=False)  # may hold a password
    redis_password_file: str | None = None
    redis_timeout_ms: float = 30.0
    limit_requests_per_minute: int | None = None
    limit_tokens_per_minute: int | None = None
    limit_concurrent_requests: int | None = None
    limit_tokens_per_day: int | None = None
    api_keys: str | None = None  # the file
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_client_auth: ClientAuth = "none"
    worker_tls_certfile: str | None = None
    worker_tls_keyfile: str | None = None
    worker_tls_ca_certs: str | None = None
    worker_tls_server_name: str | None = None
    audit_log: str | None = None  # "-": standard error
    audit_log_required: bool = False  # refuse what would have no line
    log_prompts: bool = False
    ui: bool = True  # the live page
    trace_requests: int = 1000  # that have ended, and can be explained
    trace_memory: int = 16 << 20  # bytes
    otlp_endpoint: str | None = None  # of an OpenTelemetry collector; None: nothing is exported
    trace_sample: float = 0.05  # of the requests whose clients do not say
    max_inflight: int | None = None  # answers; None: by what workers say
    queue_size: int = 1024  # requests
    queue_tokens: int = 4_000_000
    max_queue_wait: float = 60.0  # seconds
    max_stream_backlog: int = 1024 * 1024  # bytes
    slow_client_timeout: float = 30.0  # seconds
    cluster_key: str = field(default="", repr=False)  # signs handles; never in a log
    allowed_origins: tuple[str, ...] = ()
    allow_credentials: bool = False
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    max_body_bytes: int = 8 * 1024 * 1024
    max_n: int = MAX_ANSWERS
    max_stop_strings: int = 16
    max_attempts: int = 5  # of a request, that may fail in a row before it is given up on
    queue_timeout: float = 10.0  # seconds that a request waits for a worker
    slo_ttft: float | None = None  # seconds
    slo_itl: float | None = None  # seconds
    vllm_metric_names: bool = False
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    generation_config: str = "auto"
    disaggregation: Disaggregation = "conditional"
    itl_target_ms: float | None = None
    no_prefill: NoPrefill = "local"
    no_decode: NoDecode = "queue"
    drain_timeout: int = 2  # seconds that a router told to stop lets open answers end in
    log_level: str = "info"

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("model", "must not be empty")
        self._check_names()
        self._check_discovery()
        for worker in self.workers:
            try:
                options.parse_address(worker)
            except ValueError as error:
                raise ConfigError("worker", str(error)) from None
        if len(set(self.workers)) < len(self.workers):
            raise ConfigError("worker", "the same address is given twice")
        self._check_shared_state()
        self._check_security()
        self._check_admission()
        self._check_targets()
        self._check_traces()
        check_host("host", self.host)
        check_range("port", self.port, 0, 65535)
        check_range("grpc_port", self.grpc_port, -1, 65535)
        check_range("processes", self.processes, 1, MOST_PROCESSES)
        if self.port and self.port == self.grpc_port:
            raise ConfigError("grpc_port", f"{self.port} is already the HTTP port")
        check_range("max_body_bytes", self.max_body_bytes, 1024)
        check_range("max_n", self.max_n, 1, MAX_ANSWERS)
        check_range("max_stop_strings", self.max_stop_strings, 0)
        check_range("max_attempts", self.max_attempts, 1, 100)
        check_range("queue_timeout", self.queue_timeout, 0, 3600)
        check_choice("tool_call_parser", self.tool_call_parser, TOOL_PARSERS)
        check_choice("reasoning_parser", self.reasoning_parser, REASONING_PARSERS)
        check_choice("generation_config", self.generation_config, GENERATION_CONFIGS)
        check_choice("disaggregation", self.disaggregation, DISAGGREGATIONS)
        check_choice("no_prefill", self.no_prefill, NO_PREFILL)
        check_choice("no_decode", self.no_decode, NO_DECODE)
        if self.itl_target_ms is not None:
            check_range("itl_target_ms", self.itl_target_ms, 1)
        check_range("drain_timeout", self.drain_timeout, 1, 86400)
        check_choice("log_level", self.log_level, LOG_LEVELS)

    def _check_names(self) -> None:
        if not all(self.served_model_name):
            raise ConfigError("served_model_name", "must not be empty")
        if len(set(self.served_model_name)) < len(self.served_model_name):
            raise ConfigError("served_model_name", "the same name is given twice")
        if self.models is not None:
            for option, given in (
                ("worker", self.workers),
                ("served_model_name", self.served_model_name),
                ("discovery", self.discovery != "static"),
            ):
                if given:
                    raise ConfigError(option, "cannot be given together with --models, which says it of each")
        if self.allow_credentials and not self.allowed_origins:
            raise ConfigError("allow_credentials", "needs --allowed-origins")

    def _check_discovery(self) -> None:
        check_choice("discovery", self.discovery, DISCOVERIES)
        if self.discovery == "static" and not self.workers and self.models is None:
            raise ConfigError("worker", "name at least one, as host:port")
        if self.discovery != "static" and self.workers:
            raise ConfigError("worker", f"cannot be given together with --discovery {self.discovery}")
        for option in ("kubernetes_selector", "kubernetes_port"):
            if not getattr(self, option):
                raise ConfigError(option, "must not be empty")
        check_range("discovery_max_staleness", self.discovery_max_staleness, 0)

    def _check_shared_state(self) -> None:
        if self.redis_url is not None:
            check_url(self.redis_url)
        elif self.redis_password_file is not None:
            raise ConfigError("redis_password_file", "needs --redis-url")
        # A request is to wait for 50 ms at most; the rest is for what the router itself does.
        check_range("redis_timeout_ms", self.redis_timeout_ms, 1, 45)
        for name in ("requests_per_minute", "tokens_per_minute", "concurrent_requests", "tokens_per_day"):
            limit = getattr(self, f"limit_{name}")
            if limit is not None:
                check_range(f"limit_{name}", limit, 1, 10**12)

    def _check_security(self) -> None:
        check_choice("ssl_client_auth", self.ssl_client_auth, CLIENT_AUTHS)
        _ = self.client_tls, self.worker_tls
        for option in ("log_prompts", "audit_log_required"):
            if getattr(self, option) and self.audit_log is None:
                raise ConfigError(option, "needs --audit-log")

    def _check_traces(self) -> None:
        check_range("trace_requests", self.trace_requests, 0, 10**6)
        check_range("trace_memory", self.trace_memory, 0, 1 << 34)
        check_range("trace_sample", self.trace_sample, 0, 1)
        if self.otlp_endpoint is not None:
            parts = urlsplit(self.otlp_endpoint)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
                raise ConfigError("otlp_endpoint", "write it like http://127.0.0.1:4317, for OTLP over gRPC")

    def _check_admission(self) -> None:
        if self.max_inflight is not None:
            check_range("max_inflight", self.max_inflight, 1, 10**6)
        check_range("queue_size", self.queue_size, 1, 10**6)
        check_range("max_queue_wait", self.max_queue_wait, 0, 3600)
        check_range("queue_tokens", self.queue_tokens, 1, 10**9)
        check_range("max_stream_backlog", self.max_stream_backlog, 64 * 1024)
        check_range("slow_client_timeout", self.slow_client_timeout, 0.1, 3600)

    def _check_targets(self) -> None:
        for name in ("slo_ttft", "slo_itl"):
            target = getattr(self, name)
            if target is not None:
                check_range(name, target, 0.001, 3600)

    @property
    def client_tls(self) -> TlsFiles | None:
        """For HTTP and gRPC; None: they are plain."""
        return TlsFiles.given(
            "ssl",
            self.ssl_certfile,
            self.ssl_keyfile,
            self.ssl_ca_certs,
            mutual=self.ssl_client_auth == "required",
        )

    @property
    def worker_tls(self) -> TlsFiles | None:
        """Between the services; None: it is plain."""
        return TlsFiles.given(
            "worker_tls",
            self.worker_tls_certfile,
            self.worker_tls_keyfile,
            self.worker_tls_ca_certs,
            mutual=True,
            server_name=self.worker_tls_server_name,
        )

    @property
    def limits(self) -> Limits:
        """Of whoever asks where there are no keys, and of tenants that have no others."""
        return Limits(
            requests_per_minute=self.limit_requests_per_minute,
            tokens_per_minute=self.limit_tokens_per_minute,
            concurrent=self.limit_concurrent_requests,
            tokens_per_day=self.limit_tokens_per_day,
        )

    @property
    def targets(self) -> Targets:
        return Targets(self.slo_ttft, self.slo_itl)

    @property
    def placement(self) -> PlacementOptions:
        itl_target_s = None if self.itl_target_ms is None else self.itl_target_ms / 1e3
        return PlacementOptions(self.disaggregation, itl_target_s, self.no_prefill, self.no_decode)

    @property
    def model_name(self) -> str:
        """The name clients use for the model."""
        return self.model_names[0]

    @property
    def model_names(self) -> tuple[str, ...]:
        """That name, and its aliases."""
        return self.served_model_name or (options.served_name(self.model, None),)
