"""How a node that does not lead is set up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from baton.greeting.cluster_key import ClusterKeys, check_cluster_key, check_previous_key
from baton.parallel.layout import MAX_NODES
from baton.process.common_options import (
    NETWORK,
    PARALLELISM,
    AdvertisedHost,
    ClusterKey,
    ClusterKeyPrevious,
    Host,
    LogLevel,
)
from baton.process.fields import Option, check_options
from baton.process.options import ConfigError, check_filled, check_host, check_range, flag, reachable_host

NODE_PORT = 9200
JOIN_TIMEOUT_S = 600.0

NodePort = Annotated[
    int, Option("The leader's port at which the other nodes join.", PARALLELISM, least=1, most=65535)
]
JoinTimeout = Annotated[
    float,
    Option(
        "Longest wait for the other nodes of a worker, or for its leader.",
        PARALLELISM,
        metavar="SECONDS",
        least=1,
        most=86400,
    ),
]


def _check_leader(option: str, host: str) -> None:
    check_filled(option, host)
    check_host(option, host)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """One node of a worker; all else the leader tells it. Raises ConfigError when a value cannot work."""

    leader_address: Annotated[
        str,
        Option("Host of the worker that leads.", PARALLELISM, env="LWS_LEADER_ADDRESS", check=_check_leader),
    ]
    nodes: Annotated[
        int,
        Option("As the leader's --nodes.", PARALLELISM, env="LWS_GROUP_SIZE", least=2, most=MAX_NODES),
    ]
    node_index: Annotated[
        int,
        Option("Which node this is, from 1 on; the leader is 0.", PARALLELISM, env="LWS_WORKER_INDEX"),
    ]
    node_port: NodePort = NODE_PORT
    join_timeout: JoinTimeout = JOIN_TIMEOUT_S
    host: Host = "127.0.0.1"
    advertise: AdvertisedHost = None
    health_port: Annotated[
        int,
        Option(
            "HTTP port of /livez and /readyz; 0 picks one, -1 serves none.", NETWORK, least=-1, most=65535
        ),
    ] = -1
    cluster_key: ClusterKey = field(default="", repr=False)
    cluster_key_previous: ClusterKeyPrevious = field(default="", repr=False)
    log_level: LogLevel = "info"

    def __post_init__(self) -> None:
        check_options(self)
        check_range("node_index", self.node_index, 1, self.nodes - 1)
        if not self.cluster_key:
            raise ConfigError("cluster_key", "is needed to join the leader, which has the same")
        hosts = [("leader_address", self.leader_address), ("host", self.host), ("advertise", self.advertise)]
        check_cluster_key(
            self.cluster_key, [(f"{flag(option)} {host}", host) for option, host in hosts if host is not None]
        )
        check_previous_key(self.cluster_key, self.cluster_key_previous)

    @property
    def cluster_keys(self) -> ClusterKeys:
        """The keys by which other services are known."""
        return ClusterKeys(self.cluster_key.encode(), self.cluster_key_previous.encode())

    @property
    def advertised_host(self) -> str:
        """The host that ranks elsewhere call to reach those of this node."""
        return self.advertise or reachable_host(self.host)
