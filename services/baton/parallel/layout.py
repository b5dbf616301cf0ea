"""The distribution of ranks over nodes. Pure."""

from __future__ import annotations

from dataclasses import dataclass

MAX_NODES = 64
LOOPBACK = "127.0.0.1"
"""The address for the ranks of a worker on one node."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Nodes with the same number of ranks each, neighbours together. The ranks of a tensor-parallel group are
    neighbours and communicate in every layer, so a group is within one node wherever it fits; between nodes
    goes a pipeline's traffic then, once a step."""

    nodes: int
    per_node: int
    """The number of ranks of each node."""

    @classmethod
    def of(cls, tp_size: int, pp_size: int, nodes: int) -> Layout:
        """The layout for ``nodes`` nodes. ValueError says why that number does not fit, and what is
        allowed."""
        allowed = [count for count in range(1, MAX_NODES + 1) if _fits(tp_size, pp_size, count)]
        if nodes not in allowed:
            raise ValueError(
                f"nodes is {nodes}; allowed for tensor_parallel_size {tp_size} and pipeline_parallel_size "
                f"{pp_size}: {', '.join(map(str, allowed))}"
            )
        return cls(nodes, tp_size * pp_size // nodes)

    def ranks_of(self, node: int) -> range:
        return range(node * self.per_node, (node + 1) * self.per_node)

    def place_of(self, rank: int) -> int:
        """The rank's number among the ranks of its node."""
        return rank % self.per_node


def _fits(tp_size: int, pp_size: int, nodes: int) -> bool:
    """Whether no node has parts of two tensor-parallel groups beside or in place of a whole one."""
    per_node, rest = divmod(tp_size * pp_size, nodes)
    return not rest and (per_node % tp_size == 0 or tp_size % per_node == 0)
