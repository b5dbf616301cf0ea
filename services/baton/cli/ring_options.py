"""The options of commands that start a ring on this machine: ``baton up`` and ``baton serve``."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from baton.cli import arguments as arg
from baton.cli.derived import Given, OptionsOf
from baton.core.role import Role
from baton.process.common_options import PARALLELISM, PROCESS
from baton.process.fields import Option, check_options
from baton.process.options import LOG_LEVELS, loopback_beside
from baton.router.config import RouterConfig
from baton.worker.config import WorkerConfig

if TYPE_CHECKING:
    from baton.cli.ring import RingPlan

WORKER_TLS = ("worker_tls_certfile", "worker_tls_keyfile", "worker_tls_ca_certs", "worker_tls_server_name")

WORKERS = OptionsOf(
    WorkerConfig,
    without=(
        *("served_model_name", "host", "advertise", "port", "metrics_port", "data_port", "handoff_patience"),
        *(
            "cluster_key",
            "cluster_key_previous",
            *WORKER_TLS,
            "nodes",
            "node_port",
            "join_timeout",
            "threads",
        ),
        *("drain_timeout", "log_level"),
    ),
    help={"device": arg.DEVICES},
)
"""What workers of a ring on one machine can be told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RingOptions:
    """How many processes a ring has, and what is shown of them. Raises ConfigError for a value that cannot
    work."""

    prefill: Annotated[int | None, Option("Prefill workers. Default 1.")] = None
    decode: Annotated[int | None, Option("Decode workers. Default 1.")] = None
    both: Annotated[int, Option("Workers that do both; then the others default to 0.")] = 0
    prefill_tensor_parallel_size: Annotated[
        int | None, Option("Of prefill workers. Default: --tensor-parallel-size.", PARALLELISM)
    ] = None
    prefill_pipeline_parallel_size: Annotated[
        int | None, Option("Of prefill workers. Default: --pipeline-parallel-size.", PARALLELISM)
    ] = None
    decode_tensor_parallel_size: Annotated[
        int | None, Option("Of decode workers. Default: --tensor-parallel-size.", PARALLELISM)
    ] = None
    decode_pipeline_parallel_size: Annotated[
        int | None, Option("Of decode workers. Default: --pipeline-parallel-size.", PARALLELISM)
    ] = None
    threads_per_worker: Annotated[
        int | None,
        Option(
            "CPU threads of each worker, or of each of its processes. Default: the cores, shared out.",
            PROCESS,
        ),
    ] = None
    log_level: Annotated[
        str,
        Option(
            "What to show of the processes' logs: debug, info, warning or error.", PROCESS, choices=LOG_LEVELS
        ),
    ] = "warning"

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def shown_level(self) -> int:
        """The level of `logging` from which logs are shown."""
        return logging.getLevelNamesMapping()[self.log_level.upper()]


def planned(given: Given) -> RingPlan:
    """The ring that a command was asked for, with addresses chosen. Raises ConfigError for what cannot
    work."""
    from baton.cli.ring import plan, roles_wanted, with_ranks

    options = RingOptions(**given.fields(RingOptions))
    router = given.fields(RouterConfig, "log_level")
    pattern = given.fields(WorkerConfig, "host", "port", "device", "served_model_name", "log_level")
    devices = str(given.values["device"]).split(",")
    names = router.get("served_model_name", ())
    worker = WorkerConfig(
        role="both",
        served_model_name=names[0] if names else None,
        host=loopback_beside(router["host"]),
        device=devices[0],
        threads=options.threads_per_worker,
        **pattern,
    )
    own: dict[Role, WorkerConfig] = {
        "prefill": with_ranks(
            worker, "prefill", options.prefill_tensor_parallel_size, options.prefill_pipeline_parallel_size
        ),
        "decode": with_ranks(
            worker, "decode", options.decode_tensor_parallel_size, options.decode_pipeline_parallel_size
        ),
    }
    roles = roles_wanted(options.prefill, options.decode, options.both)
    return plan(worker, roles, devices, router, own)
