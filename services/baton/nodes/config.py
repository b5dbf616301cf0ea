"""How a node that does not lead is set up."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.options import LOG_LEVELS, ConfigError, check_choice, check_host, check_range, reachable_host
from baton.parallel.layout import MOST_NODES

NODE_PORT = 9200
JOIN_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """One node of a worker; all else the leader tells it. Raises ConfigError when a value cannot work."""

    leader_address: str
    """The leader's host."""
    nodes: int
    """The leader's included."""
    node_index: int
    node_port: int = NODE_PORT
    """The leader's, at which nodes join."""
    join_timeout: float = JOIN_TIMEOUT_S  # seconds
    host: str = "127.0.0.1"
    advertise: str | None = None
    health_port: int = -1
    cluster_key: str = field(default="", repr=False)
    log_level: str = "info"

    def __post_init__(self) -> None:
        if not self.leader_address:
            raise ConfigError("leader_address", "must not be empty")
        check_host("leader_address", self.leader_address)
        check_host("host", self.host)
        check_host("advertise", self.advertise or "")
        check_range("nodes", self.nodes, 2, MOST_NODES)
        check_range("node_index", self.node_index, 1, self.nodes - 1)
        check_range("node_port", self.node_port, 1, 65535)
        check_range("join_timeout", self.join_timeout, 1, 86400)
        check_range("health_port", self.health_port, -1, 65535)
        check_choice("log_level", self.log_level, LOG_LEVELS)
        if not self.cluster_key:
            raise ConfigError("cluster_key", "is needed to join the leader, which has the same")

    @property
    def advertised_host(self) -> str:
        """The host that ranks elsewhere call to reach those of this node."""
        return self.advertise or reachable_host(self.host)
