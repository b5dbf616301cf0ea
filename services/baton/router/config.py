"""How the router is set up. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

from baton.greeting.cluster_key import ClusterKeys, check_cluster_key, check_previous_key
from baton.net.certificates import ClientAuth, TlsFiles
from baton.process import options
from baton.process.common_options import (
    DISCOVERY,
    LIMITS,
    MODEL,
    NETWORK,
    PLACEMENT,
    PROCESS,
    SECURITY,
    TARGETS,
    TRACES,
    ClusterKey,
    ClusterKeyPrevious,
    Host,
    LogLevel,
    ModelName,
    VllmMetricNames,
    WorkerTlsCaCerts,
    WorkerTlsCertfile,
    WorkerTlsKeyfile,
    WorkerTlsServerName,
)
from baton.process.fields import Option, check_options
from baton.process.options import ConfigError, check_filled, parse_size
from baton.request.defaults import GENERATION_CONFIGS
from baton.request.limits import MAX_ANSWERS
from baton.router.discovery.kubernetes_options import (
    Kubeconfig,
    KubernetesContext,
    KubernetesNamespace,
    KubernetesPort,
    KubernetesSelector,
)
from baton.router.discovery.slices import ROLE_LABEL
from baton.router.placement import Disaggregation, NoDecode, NoPrefill, PlacementOptions
from baton.router.shared.limits import Limits
from baton.router.shared.redis_store import check_url
from baton.tools.formats import REASONING_PARSERS, TOOL_PARSERS

if TYPE_CHECKING:
    from baton.telemetry.goodput import GoodputTargets

DISCOVERIES = ("static", "kubernetes")
MAX_PROCESSES = 64
MAX_OF_A_LIMIT = 10**12


def _check_otlp_endpoint(option: str, url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
        raise ConfigError(option, "write it like http://127.0.0.1:4317, for OTLP over gRPC")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """One router. Raises ConfigError when a value cannot work.

    A port of 0 is picked by the system and told in the ready line; a gRPC port of -1 serves no gRPC.
    """

    workers: Annotated[
        tuple[str, ...],
        Option(
            "A worker's gRPC address; give the option once for each worker.",
            NETWORK,
            flags="--worker",
            metavar="HOST:PORT",
        ),
    ] = ()
    discovery: Annotated[
        str,
        Option(
            "How the router knows the workers: static (--worker), or kubernetes (EndpointSlices).",
            DISCOVERY,
            choices=DISCOVERIES,
        ),
    ] = "static"
    kubernetes_namespace: KubernetesNamespace = None
    kubernetes_selector: KubernetesSelector = ROLE_LABEL
    kubernetes_port: KubernetesPort = "grpc"
    kubeconfig: Kubeconfig = None
    kubernetes_context: KubernetesContext = None
    discovery_max_staleness: Annotated[
        float,
        Option(
            "The router is not ready when the set of workers was not confirmed for longer; 0: no bound.",
            DISCOVERY,
            metavar="SECONDS",
            least=0,
        ),
    ] = 300.0
    redis_url: Annotated[
        str | None,
        Option(
            "Where routers keep limits together: redis://HOST:PORT/DB, or rediss:// for TLS. "
            "Default: each router by itself.",
            LIMITS,
            env="BATON_REDIS_URL",
            show_default=False,
            metavar="URL",
        ),
    ] = field(default=None, repr=False)
    """The URL of Redis. It may hold a password."""
    redis_password_file: Annotated[
        str | None,
        Option(
            "Redis's password. Default: that in $BATON_REDIS_PASSWORD, else of the URL.",
            LIMITS,
            metavar="PATH",
        ),
    ] = None
    redis_timeout_ms: Annotated[
        float,
        Option("How long a request waits for Redis, up to 45 ms.", LIMITS, metavar="MS", least=1, most=45),
    ] = 30.0
    """A request is to wait for 50 ms at most; the rest is for what the router itself does."""
    limit_requests_per_minute: Annotated[
        int | None,
        Option(
            "Requests in any minute, of all clients together; with --api-keys, of each tenant that the file "
            "says nothing else of.",
            LIMITS,
            least=1,
            most=MAX_OF_A_LIMIT,
        ),
    ] = None
    limit_tokens_per_minute: Annotated[
        int | None, Option("Tokens in any minute, read and written.", LIMITS, least=1, most=MAX_OF_A_LIMIT)
    ] = None
    limit_concurrent_requests: Annotated[
        int | None, Option("Requests under way at once.", LIMITS, least=1, most=MAX_OF_A_LIMIT)
    ] = None
    limit_tokens_per_day: Annotated[
        int | None, Option("Tokens in a UTC day.", LIMITS, least=1, most=MAX_OF_A_LIMIT)
    ] = None
    api_keys: Annotated[
        str | None,
        Option(
            "API keys (YAML or JSON; see `baton keys create`), read again when they change. "
            "Default: everybody may ask.",
            SECURITY,
            metavar="FILE",
        ),
    ] = None
    ssl_certfile: Annotated[
        str | None,
        Option(
            "Certificate chain (PEM) for TLS on HTTP and gRPC, read again when it changes.",
            SECURITY,
            metavar="FILE",
        ),
    ] = None
    ssl_keyfile: Annotated[str | None, Option("Its private key (PEM).", SECURITY, metavar="FILE")] = None
    ssl_ca_certs: Annotated[
        str | None, Option("Who signs clients' certificates (PEM).", SECURITY, metavar="FILE")
    ] = None
    ssl_client_auth: Annotated[
        ClientAuth,
        Option(
            "none, or required: only clients with a certificate of --ssl-ca-certs connect (mTLS).", SECURITY
        ),
    ] = "none"
    worker_tls_certfile: WorkerTlsCertfile = None
    worker_tls_keyfile: WorkerTlsKeyfile = None
    worker_tls_ca_certs: WorkerTlsCaCerts = None
    worker_tls_server_name: WorkerTlsServerName = None
    audit_log: Annotated[
        str | None,
        Option(
            "One line of JSON for each request, without its words; - for standard error.",
            SECURITY,
            metavar="FILE|-",
        ),
    ] = None
    audit_log_required: Annotated[
        bool, Option("Refuse requests with 503 while the audit log cannot be written.", SECURITY)
    ] = False
    log_prompts: Annotated[
        bool, Option("Write prompts to the audit log too, up to 4096 characters each.", SECURITY)
    ] = False
    ui: Annotated[bool, Option("Serve a live page at /ui.", TRACES)] = True
    trace_requests: Annotated[
        int,
        Option(
            "Requests that have ended and are kept for `baton explain`, the latest.",
            TRACES,
            least=0,
            most=10**6,
        ),
    ] = 1000
    trace_memory: Annotated[
        int,
        Option(
            "Memory for them; those that ended first go.",
            TRACES,
            parse=parse_size,
            metavar="SIZE",
            least=0,
            most=1 << 34,
        ),
    ] = 16 << 20
    otlp_endpoint: Annotated[
        str | None,
        Option(
            "Send spans of requests to this OpenTelemetry collector: http://HOST:4317, OTLP over gRPC.",
            TRACES,
            metavar="URL",
            check=_check_otlp_endpoint,
        ),
    ] = None
    trace_sample: Annotated[
        float,
        Option(
            "Of the requests whose traceparent does not say, those to send spans of: 0 to 1.",
            TRACES,
            metavar="SHARE",
            least=0,
            most=1,
        ),
    ] = 0.05
    max_inflight: Annotated[
        int | None,
        Option(
            "Answers that may be under way at once; others wait their turn, in fair shares of the tenants. "
            "Default: what the workers say they run at once and a quarter more, and four for each prefill "
            "worker.",
            LIMITS,
            least=1,
            most=10**6,
        ),
    ] = None
    queue_size: Annotated[
        int,
        Option("Requests that may wait their turn; those beyond are refused.", LIMITS, least=1, most=10**6),
    ] = 1024
    queue_tokens: Annotated[
        int,
        Option("Prompt tokens of all requests that wait their turn.", LIMITS, least=1, most=10**9),
    ] = 4_000_000
    max_queue_wait: Annotated[
        float,
        Option(
            "A request that should wait its turn for more than 0.7 of this is refused at once; one that has "
            "waited for three times as long, after all.",
            LIMITS,
            metavar="SECONDS",
            least=0,
            most=3600,
        ),
    ] = 60.0
    max_stream_backlog: Annotated[
        int,
        Option(
            "What a client may leave unread of a stream; beyond it the stream is cut.",
            LIMITS,
            parse=parse_size,
            metavar="SIZE",
            least=64 * 1024,
        ),
    ] = 1024 * 1024
    slow_client_timeout: Annotated[
        float,
        Option(
            "A client that reads nothing for so long while something is there for it is cut off.",
            LIMITS,
            metavar="SECONDS",
            least=0.1,
            most=3600,
        ),
    ] = 30.0
    model: ModelName = "demo"
    served_model_name: Annotated[
        tuple[str, ...],
        Option(
            "The name clients ask for; give the option again for each other name. Default: the directory's "
            "own name, or what --model says.",
            MODEL,
            metavar="NAME",
        ),
    ] = ()
    """The first is the model's name, the others are aliases."""
    models: Annotated[
        str | None,
        Option(
            "Serve several models: a YAML or JSON list of {name, aliases, model, workers or "
            "kubernetes_selector}. The first is meant where a request names none.",
            MODEL,
            metavar="FILE",
        ),
    ] = None
    """Each model has a configuration of its own: `baton.router.models_file`."""
    host: Host = "127.0.0.1"
    port: Annotated[int, Option("Port of the HTTP API; 0 picks one.", NETWORK, least=0, most=65535)] = 8000
    grpc_port: Annotated[
        int, Option("Port of the gRPC API; 0 picks one, -1 serves none.", NETWORK, least=-1, most=65535)
    ] = 8001
    processes: Annotated[
        int,
        Option(
            "Router processes that share the ports; one uses one core. Limits that Redis does not keep are "
            "shared out between them.",
            NETWORK,
            least=1,
            most=MAX_PROCESSES,
        ),
    ] = 1
    allowed_origins: Annotated[
        tuple[str, ...],
        Option(
            "Let pages of this origin use the API from a browser; * is any. Give it once for each.",
            NETWORK,
            metavar="ORIGIN",
        ),
    ] = ()
    allow_credentials: Annotated[
        bool,
        Option(
            "Let those pages send credentials.",
            NETWORK,
            flags="--allow-credentials/--no-allow-credentials",
        ),
    ] = False
    allowed_methods: Annotated[
        tuple[str, ...], Option("That those pages may use. Default: any.", NETWORK, metavar="METHOD")
    ] = ("*",)
    allowed_headers: Annotated[
        tuple[str, ...], Option("That those pages may send. Default: any.", NETWORK, metavar="HEADER")
    ] = ("*",)
    cluster_key: ClusterKey = field(default="", repr=False)
    """Signs handles; never in a log."""
    cluster_key_previous: ClusterKeyPrevious = field(default="", repr=False)
    max_body_bytes: Annotated[
        int, Option("Largest request body.", LIMITS, parse=parse_size, metavar="SIZE", least=1024)
    ] = 8 * 1024 * 1024
    max_n: Annotated[int, Option("Most answers (n) to one request.", LIMITS, least=1, most=MAX_ANSWERS)] = (
        MAX_ANSWERS
    )
    max_stop_strings: Annotated[int, Option("Most stop strings in one request.", LIMITS, least=0)] = 16
    max_attempts: Annotated[
        int,
        Option(
            "So many attempts of a request may fail, as workers die or handoffs break; then it is given up "
            "on.",
            LIMITS,
            least=1,
            most=100,
        ),
    ] = 5
    queue_timeout: Annotated[
        float,
        Option(
            "Longest time that a request waits for a worker that can take it; 0: not at all.",
            LIMITS,
            metavar="SECONDS",
            least=0,
            most=3600,
        ),
    ] = 10.0
    slo_ttft: Annotated[
        float | None,
        Option(
            "Count requests whose answers begin later than this as misses (baton_slo_requests_total), with "
            "the reason.",
            TARGETS,
            metavar="SECONDS",
            least=0.001,
            most=3600,
        ),
    ] = None
    slo_itl: Annotated[
        float | None,
        Option(
            "Likewise those of which more than one token in a hundred comes later than this after the one "
            "before.",
            TARGETS,
            metavar="SECONDS",
            least=0.001,
            most=3600,
        ),
    ] = None
    vllm_metric_names: VllmMetricNames = False
    tool_call_parser: Annotated[
        str,
        Option(
            "How the model writes tool calls: hermes, llama3_json, none, or auto: as its template shows.",
            MODEL,
            choices=TOOL_PARSERS,
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        Option(
            "How the model marks its reasoning: think, deepseek_r1 (answers always begin inside), none, or "
            "auto: as its template shows.",
            MODEL,
            choices=REASONING_PARSERS,
        ),
    ] = "auto"
    generation_config: Annotated[
        str,
        Option(
            "Sampling fields that requests do not give: auto, as the model's generation_config.json says, "
            "or none, OpenAI's defaults.",
            MODEL,
            choices=GENERATION_CONFIGS,
        ),
    ] = "auto"
    disaggregation: Annotated[
        Disaggregation,
        Option(
            "Where prompts are computed. conditional: on a prefill worker, or on the decode worker where "
            "that is estimated to cost less; always: on a prefill worker while one is ready; never: where "
            "they are answered.",
            PLACEMENT,
        ),
    ] = "conditional"
    itl_target_ms: Annotated[
        float | None,
        Option(
            "Longest step of a decode worker that a prompt may be computed in beside running answers. "
            "Default: their delay counts like that of the prompt's own first token.",
            PLACEMENT,
            metavar="MS",
            least=1,
        ),
    ] = None
    no_prefill: Annotated[
        NoPrefill,
        Option(
            "While no prefill worker is ready: fail requests, queue them, or compute prompts where they are "
            "answered (local).",
            PLACEMENT,
        ),
    ] = "local"
    no_decode: Annotated[
        NoDecode,
        Option("While no worker is ready that could answer: fail requests, or queue them.", PLACEMENT),
    ] = "queue"
    drain_timeout: Annotated[
        int,
        Option(
            "Longest time that a router told to stop lets answers under way end in; it takes nothing new "
            "meanwhile. A second signal ends it at once.",
            PROCESS,
            metavar="SECONDS",
            least=1,
            most=86400,
        ),
    ] = 2
    log_level: LogLevel = "info"

    def __post_init__(self) -> None:
        check_options(self)
        self._check_names()
        self._check_discovery()
        self._check_shared_state()
        self._check_security()
        if self.port and self.port == self.grpc_port:
            raise ConfigError("grpc_port", f"{self.port} is already the HTTP port")
        self._check_cluster_key()

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
        if self.discovery == "static" and not self.workers and self.models is None:
            raise ConfigError("worker", "name at least one, as host:port")
        if self.discovery != "static" and self.workers:
            raise ConfigError("worker", f"cannot be given together with --discovery {self.discovery}")
        for worker in self.workers:
            try:
                options.parse_address(worker)
            except ValueError as error:
                raise ConfigError("worker", str(error)) from None
        if len(set(self.workers)) < len(self.workers):
            raise ConfigError("worker", "the same address is given twice")
        for option in ("kubernetes_selector", "kubernetes_port"):
            check_filled(option, getattr(self, option))

    def _check_shared_state(self) -> None:
        if self.redis_url is not None:
            check_url(self.redis_url)
        elif self.redis_password_file is not None:
            raise ConfigError("redis_password_file", "needs --redis-url")

    def _check_security(self) -> None:
        _ = self.client_tls, self.worker_tls
        for option in ("log_prompts", "audit_log_required"):
            if getattr(self, option) and self.audit_log is None:
                raise ConfigError(option, "needs --audit-log")

    def _check_cluster_key(self) -> None:
        reached = [(f"--host {self.host}", self.host)]
        reached += [(f"--worker {each}", options.parse_address(each)[0]) for each in self.workers]
        if self.discovery != "static":
            reached.append((f"--discovery {self.discovery}", self.discovery))
        check_cluster_key(self.cluster_key, reached)
        check_previous_key(self.cluster_key, self.cluster_key_previous)

    @property
    def cluster_keys(self) -> ClusterKeys:
        """The keys by which other services are known."""
        return ClusterKeys(self.cluster_key.encode(), self.cluster_key_previous.encode())

    @property
    def client_tls(self) -> TlsFiles | None:
        """The certificates of HTTP and gRPC; None: they are plain."""
        return TlsFiles.from_options(
            "ssl",
            self.ssl_certfile,
            self.ssl_keyfile,
            self.ssl_ca_certs,
            mutual=self.ssl_client_auth == "required",
        )

    @property
    def worker_tls(self) -> TlsFiles | None:
        """The certificates between the services; None: that traffic is plain."""
        return TlsFiles.from_options(
            "worker_tls",
            self.worker_tls_certfile,
            self.worker_tls_keyfile,
            self.worker_tls_ca_certs,
            mutual=True,
            server_name=self.worker_tls_server_name,
        )

    @property
    def limits(self) -> Limits:
        """The limits of everybody where there are no keys, and of tenants that have no others."""
        return Limits(
            requests_per_minute=self.limit_requests_per_minute,
            tokens_per_minute=self.limit_tokens_per_minute,
            concurrent=self.limit_concurrent_requests,
            tokens_per_day=self.limit_tokens_per_day,
        )

    @property
    def targets(self) -> GoodputTargets:
        # It brings the client of Prometheus, which the command line can do without.
        from baton.telemetry.goodput import GoodputTargets

        return GoodputTargets(self.slo_ttft, self.slo_itl)

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
