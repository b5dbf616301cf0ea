"""How one worker is set up. Imports no torch, so that a bad option is refused at once."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from baton.engine.options import EngineOptions
from baton.greeting.cluster_key import ClusterKeys, check_cluster_key, check_previous_key
from baton.greeting.names import MAX_NAME, is_name, is_words, shown
from baton.net.certificates import TlsFiles
from baton.nodes.config import JOIN_TIMEOUT_S, NODE_PORT, JoinTimeout, NodePort
from baton.parallel.layout import Layout
from baton.process import options
from baton.process.common_options import (
    MEMORY,
    MODEL,
    NETWORK,
    PARALLELISM,
    PROCESS,
    AdvertisedHost,
    ClusterKey,
    ClusterKeyPrevious,
    Host,
    LogLevel,
    MetricsPort,
    ModelName,
    VllmMetricNames,
    WorkerTlsCaCerts,
    WorkerTlsCertfile,
    WorkerTlsKeyfile,
    WorkerTlsServerName,
)
from baton.process.fields import Before, Option, check_options, values_of
from baton.process.options import ConfigError, check_choice, check_range, parse_size
from baton.speculation.config import ONE_PROCESS, WITH_MODEL
from baton.transport.kv_types import KVConvert
from baton.transport.registry import TRANSPORTS

Role = Literal["prefill", "decode", "both"]
SchedulingPolicy = Literal["fcfs", "priority"]

ROLES: tuple[Role, ...] = ("prefill", "decode", "both")
CONNECTORS = ("auto", *TRANSPORTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(EngineOptions):
    """One worker process. Raises ConfigError when a value cannot work.

    A port of 0 is picked by the system and told in the ready line; a metrics port of -1 serves none.
    None means "decide from the model or the machine".
    """

    role: Role
    model: Annotated[ModelName, Before("dtype")] = "demo"
    served_model_name: Annotated[
        str | None,
        Option("The name clients ask for. Default: the directory's own name, or what --model says.", MODEL),
        Before("dtype"),
    ] = None
    kv_revision: Annotated[
        str | None,
        Option(
            "A name for what KV is computed with, in place of the checkpoint's own: workers of one name hand "
            "over to each other though their weights differ, such as FP8 in prefill and INT4 in decode. "
            "Answers are then those of neither.",
            MODEL,
        ),
        Before("dtype"),
    ] = None
    host: Annotated[Host, Before("block_size")] = "127.0.0.1"
    advertise: AdvertisedHost = None
    """The host peers and routers are told; needed where ``host`` is no address."""
    port: Annotated[
        int,
        Option("gRPC port for routers and other workers; 0 picks one.", NETWORK, least=0, most=65535),
    ] = 0
    metrics_port: MetricsPort = 0
    vllm_metric_names: VllmMetricNames = False
    data_port: Annotated[
        int,
        Option(
            "Port that KV blocks arrive on (other connectors: those that follow); 0 picks.",
            NETWORK,
            least=0,
            most=65535,
        ),
    ] = 0
    connector: Annotated[
        str,
        Option(
            "How KV blocks travel: auto (the best that both sides have; with --worker-tls-certfile tcp, "
            f"which alone encrypts them), {', '.join(CONNECTORS[1:-1])} or {CONNECTORS[-1]}.",
            NETWORK,
            choices=CONNECTORS,
        ),
    ] = "auto"
    require_rdma: Annotated[
        bool,
        Option(
            "Do not start unless a connector that --connector allows moves KV blocks by RDMA here, and offer "
            "no other.",
            NETWORK,
        ),
    ] = False
    verify_handoff: Annotated[
        bool,
        Option(
            "Compare a checksum of every transfer of KV blocks; one that differs fails the handoff.", NETWORK
        ),
    ] = False
    kv_convert: Annotated[
        KVConvert,
        Option(
            "allow: a decode worker takes KV over that its prefill worker keeps in another type, FP8 or the "
            "model's, and converts it as it arrives. none: it refuses the link.",
            NETWORK,
        ),
    ] = "none"
    handoff_patience: Annotated[
        float,
        Option(
            "Seconds that decode waits for a sign of life of one handoff on a healthy link.",
            NETWORK,
            least=1,
        ),
    ] = 60.0
    cluster_key: ClusterKey = field(default="", repr=False)
    """Signs handles; never in a log."""
    cluster_key_previous: ClusterKeyPrevious = field(default="", repr=False)
    worker_tls_certfile: Annotated[WorkerTlsCertfile, Before("block_size")] = None
    worker_tls_keyfile: WorkerTlsKeyfile = None
    worker_tls_ca_certs: WorkerTlsCaCerts = None
    worker_tls_server_name: WorkerTlsServerName = None
    kv_cache_memory: Annotated[
        int | None,
        Option(
            "Memory for KV blocks per worker, such as 2GiB, instead of --num-blocks.",
            MEMORY,
            parse=parse_size,
            metavar="SIZE",
            least=1,
        ),
        Before("max_num_seqs"),
    ] = None
    host_kv_memory: Annotated[
        int,
        Option(
            "Host memory per worker for KV blocks that the pool has no room for any more, such as 16GiB; "
            "they come back by copy. 0 keeps none.",
            MEMORY,
            parse=parse_size,
            metavar="SIZE",
            least=0,
        ),
        Before("max_num_seqs"),
    ] = 0
    gpu_memory_utilization: Annotated[
        float,
        Option(
            "On CUDA, the share of the device's memory that may be used, by all of its processes together; "
            "KV blocks take what weights and steps leave of it. Workers that share a device need "
            "--kv-cache-memory.",
            MEMORY,
            least=0.01,
            most=1,
        ),
        Before("max_num_seqs"),
    ] = 0.9
    scheduling_policy: Annotated[
        SchedulingPolicy,
        Option(
            "fcfs: first come, first served. priority: requests with a lower priority field go first.", MEMORY
        ),
    ] = "fcfs"
    priority_aging: Annotated[
        float,
        Option(
            "With --scheduling-policy priority: how long a request waits to make up for one level.",
            MEMORY,
            metavar="SECONDS",
            least=0,
            most=86400,
        ),
    ] = 30.0
    nodes: Annotated[
        int,
        Option(
            "Machines, or pods, that the processes of this worker are on: this one, which leads, and those "
            "on which `baton node` runs.",
            PARALLELISM,
        ),
    ] = 1
    node_port: NodePort = NODE_PORT
    join_timeout: JoinTimeout = JOIN_TIMEOUT_S
    threads: Annotated[
        int | None,
        Option(
            "CPU threads of a worker, or of each of its processes. Default: the library's choice, or the "
            "cores shared out to the processes.",
            PROCESS,
            least=1,
        ),
    ] = None
    drain_timeout: Annotated[
        int | None,
        Option(
            "Longest time that a worker told to stop waits for its open requests. Default: no limit. "
            "A second signal ends it at once.",
            PROCESS,
            metavar="SECONDS",
            least=1,
        ),
    ] = None
    log_level: LogLevel = "info"

    def __post_init__(self) -> None:
        check_choice("role", self.role, ROLES)
        check_options(self)
        self._check_memory()
        self._check_speculation()
        self._check_parallelism()
        if self.verify_handoff and self.kv_convert != "none":
            problem = "cannot be given together with --kv-convert allow, which changes the bytes it compares"
            raise ConfigError("verify_handoff", problem)
        _ = self.tls
        self._check_cluster_key()

    def _check_cluster_key(self) -> None:
        if not is_words(self.model_name):
            name = shown(self.model_name)
            problem = f"must be at most {MAX_NAME} printable characters, not {name}"
            raise ConfigError("served_model_name", problem)
        if self.kv_revision is not None and not is_name(self.kv_revision):
            problem = f"must be 1 to {MAX_NAME} visible ASCII characters, not {shown(self.kv_revision)}"
            raise ConfigError("kv_revision", problem)
        reached = [(f"--host {self.host}", self.host)]
        if self.advertise is not None:
            reached.append((f"--advertise {self.advertise}", self.advertise))
        check_cluster_key(self.cluster_key, reached)
        check_previous_key(self.cluster_key, self.cluster_key_previous)

    def _check_memory(self) -> None:
        if self.host_kv_memory and not self.prefix_caching:
            raise ConfigError("host_kv_memory", "cannot be given together with --no-prefix-caching")
        if self.num_blocks is not None and self.kv_cache_memory is not None:
            raise ConfigError("num_blocks", "cannot be given together with --kv-cache-memory")

    def _check_speculation(self) -> None:
        check_range("speculative_ngram_min", self.speculative_ngram_min, 1, self.speculative_ngram_max)
        if self.speculative_method not in WITH_MODEL and self.speculative_model:
            methods = ", ".join(WITH_MODEL)
            raise ConfigError("speculative_model", f"can only be given with --speculative-method {methods}")

    def _check_parallelism(self) -> None:
        self._check_nodes()
        if self.world == 1:
            return
        option = "tensor_parallel_size" if self.tensor_parallel_size > 1 else "pipeline_parallel_size"
        if self.speculative_method in ONE_PROCESS:
            method = self.speculative_method
            raise ConfigError(
                option, f"must be 1 with --speculative-method {method}; allowed: none, ngram, draft"
            )

    def _check_nodes(self) -> None:
        try:
            _ = self.layout
        except ValueError as error:
            raise ConfigError("nodes", str(error)) from None
        if self.nodes > 1 and not self.cluster_key:
            raise ConfigError("nodes", f"{self.nodes} need a --cluster-key, by which they know each other")

    @property
    def layout(self) -> Layout:
        """The layout of ranks on nodes."""
        return Layout.of(self.tensor_parallel_size, self.pipeline_parallel_size, self.nodes)

    @property
    def cluster_keys(self) -> ClusterKeys:
        """The keys by which other services are known."""
        return ClusterKeys(self.cluster_key.encode(), self.cluster_key_previous.encode())

    @property
    def tls(self) -> TlsFiles | None:
        """The certificates between the services; None: that traffic is plain."""
        return TlsFiles.from_options(
            "worker_tls",
            self.worker_tls_certfile,
            self.worker_tls_keyfile,
            self.worker_tls_ca_certs,
            mutual=True,
            server_name=self.worker_tls_server_name,
        )

    def engine_settings(self) -> dict[str, Any]:
        """What of it an engine is told, by the names that the engine has for it."""
        return values_of(self, EngineOptions) | {
            "kv_cache_bytes": self.kv_cache_memory,
            "host_kv_bytes": self.host_kv_memory,
            "device_memory_fraction": self.gpu_memory_utilization,
            "priority_aging": self.priority_aging if self.scheduling_policy == "priority" else None,
            "num_threads": self.threads,
        }

    @property
    def model_name(self) -> str:
        """The name clients use for the model."""
        return options.served_name(self.model, self.served_model_name)

    @property
    def advertised_host(self) -> str:
        """The host that peers and routers call to reach this worker."""
        return self.advertise or options.reachable_host(self.host)


SERVING_ONLY = frozenset(
    {field.name for field in fields(WorkerConfig)}
    - {field.name for field in fields(EngineOptions)}
    - {"model", "kv_cache_memory", "threads"}
)
"""The fields that are of no use to an engine without a server."""
