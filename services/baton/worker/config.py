"""How one worker is set up. Imports no torch, so that a bad option is refused at once."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from baton import options
from baton.models.quantization import QUANTIZATIONS, Quantization
from baton.nodes.config import JOIN_TIMEOUT_S, NODE_PORT
from baton.options import LOG_LEVELS, ConfigError, check_choice, check_host, check_range
from baton.parallel.layout import Layout
from baton.speculation.config import METHODS, MOST_NGRAM, MOST_TOKENS, WITH_MODEL, Method
from baton.tls.files import TlsFiles

RoleName = Literal["prefill", "decode", "both"]
LoadFormat = Literal["auto", "dummy"]
SchedulingPolicy = Literal["fcfs", "priority"]

ROLES: tuple[RoleName, ...] = ("prefill", "decode", "both")
DTYPES = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS: tuple[LoadFormat, ...] = ("auto", "dummy")
SCHEDULING_POLICIES: tuple[SchedulingPolicy, ...] = ("fcfs", "priority")
MOST_RANKS = 128
CONNECTORS = ("auto", "tcp", "ucx", "nccl", "gloo")

_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """One worker process. Raises ConfigError when a value cannot work.

    A port of 0 is picked by the system and told in the ready line; a metrics port of -1 serves none.
    None means "decide from the model or the machine".
    """

    role: RoleName
    model: str = "demo"
    served_model_name: str | None = None
    dtype: str = "auto"
    quantization: Quantization = "none"
    device: str = "auto"
    load_format: LoadFormat = "auto"
    host: str = "127.0.0.1"
    advertise: str | None = None  # the host peers and routers are told; needed where ``host`` is no address
    port: int = 0
    metrics_port: int = 0
    vllm_metric_names: bool = False
    connector: str = "auto"
    verify_handoff: bool = False
    handoff_patience: float = 60.0  # seconds
    data_port: int = 0  # of the best connector; the others use the ports that follow
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_memory: int | None = None  # bytes
    host_kv_memory: int = 0  # bytes
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    prefill_chunk: int = 256
    mixed_prefill_tokens: int | None = None
    chunked_prefill: bool = True
    prefix_caching: bool = True
    enforce_eager: bool = False
    scheduling_policy: SchedulingPolicy = "fcfs"
    priority_aging: float = 30.0  # seconds of waiting worth one level of priority
    max_model_len: int | None = None
    speculative_method: Method = "none"
    speculative_model: str | None = None
    num_speculative_tokens: int = 4
    speculative_ngram_min: int = 2
    speculative_ngram_max: int = 4
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    nodes: int = 1  # this one included, which leads
    node_port: int = NODE_PORT  # at which the others join
    join_timeout: float = JOIN_TIMEOUT_S  # seconds
    threads: int | None = None
    drain_timeout: int | None = None  # seconds; None: as long as what is open takes
    worker_tls_certfile: str | None = None
    worker_tls_keyfile: str | None = None
    worker_tls_ca_certs: str | None = None
    worker_tls_server_name: str | None = None
    cluster_key: str = field(default="", repr=False)  # signs handles; never in a log
    log_level: str = "info"

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("model", "must not be empty")
        check_choice("role", self.role, ROLES)
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("quantization", self.quantization, QUANTIZATIONS)
        check_choice("load_format", self.load_format, LOAD_FORMATS)
        check_choice("connector", self.connector, CONNECTORS)
        check_choice("scheduling_policy", self.scheduling_policy, SCHEDULING_POLICIES)
        check_choice("log_level", self.log_level, LOG_LEVELS)
        if not _DEVICE.fullmatch(self.device):
            raise ConfigError("device", f"must be auto, cpu, cuda or cuda:N, not {self.device!r}")
        check_host("host", self.host)
        check_host("advertise", self.advertise or "")
        self._check_ports()
        self._check_sizes()
        self._check_speculation()
        self._check_parallelism()
        _ = self.tls

    def _check_ports(self) -> None:
        check_range("port", self.port, 0, 65535)
        check_range("data_port", self.data_port, 0, 65535)
        check_range("metrics_port", self.metrics_port, -1, 65535)

    def _check_sizes(self) -> None:
        check_range("block_size", self.block_size, 1, 1024)
        check_range("handoff_patience", self.handoff_patience, 1)
        check_range("max_num_seqs", self.max_num_seqs, 1)
        check_range("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        check_range("prefill_chunk", self.prefill_chunk, 1)
        check_range("host_kv_memory", self.host_kv_memory, 0)
        if self.host_kv_memory and not self.prefix_caching:
            raise ConfigError("host_kv_memory", "cannot be given together with --no-prefix-caching")
        check_range("priority_aging", self.priority_aging, 0, 86400)
        optional = ("num_blocks", "kv_cache_memory", "max_model_len", "threads", "drain_timeout")
        for option in ("mixed_prefill_tokens", *optional):
            value = getattr(self, option)
            if value is not None:
                check_range(option, value, 1)
        if self.num_blocks is not None and self.kv_cache_memory is not None:
            raise ConfigError("num_blocks", "cannot be given together with --kv-cache-memory")

    def _check_speculation(self) -> None:
        check_choice("speculative_method", self.speculative_method, METHODS)
        check_range("num_speculative_tokens", self.num_speculative_tokens, 1, MOST_TOKENS)
        check_range("speculative_ngram_max", self.speculative_ngram_max, 1, MOST_NGRAM)
        check_range("speculative_ngram_min", self.speculative_ngram_min, 1, self.speculative_ngram_max)
        if self.speculative_method not in WITH_MODEL and self.speculative_model:
            methods = ", ".join(WITH_MODEL)
            raise ConfigError("speculative_model", f"can only be given with --speculative-method {methods}")

    def _check_parallelism(self) -> None:
        check_range("tensor_parallel_size", self.tensor_parallel_size, 1, MOST_RANKS)
        check_range("pipeline_parallel_size", self.pipeline_parallel_size, 1, MOST_RANKS)
        self._check_nodes()
        if self.world == 1:
            return
        option = "tensor_parallel_size" if self.tensor_parallel_size > 1 else "pipeline_parallel_size"
        if self.speculative_method in ("medusa", "eagle"):
            method = self.speculative_method
            raise ConfigError(
                option, f"must be 1 with --speculative-method {method}; allowed: none, ngram, draft"
            )

    def _check_nodes(self) -> None:
        check_range("node_port", self.node_port, 1, 65535)
        check_range("join_timeout", self.join_timeout, 1, 86400)
        try:
            _ = self.layout
        except ValueError as error:
            raise ConfigError("nodes", str(error)) from None
        if self.nodes > 1 and not self.cluster_key:
            raise ConfigError("nodes", f"{self.nodes} need a --cluster-key, by which they know each other")

    @property
    def layout(self) -> Layout:
        """Which node has which ranks."""
        return Layout.of(self.tensor_parallel_size, self.pipeline_parallel_size, self.nodes)

    @property
    def tls(self) -> TlsFiles | None:
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
    def world(self) -> int:
        """Processes that the model is split over."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def model_name(self) -> str:
        """The name clients use for the model."""
        return options.served_name(self.model, self.served_model_name)

    @property
    def advertised_host(self) -> str:
        """The host that peers and routers call to reach this worker."""
        return self.advertise or options.reachable_host(self.host)
