"""Which node has which ranks. Pure."""

from __future__ import annotations

from dataclasses import dataclass

MOST_NODES = 64
LOOPBACK = "127.0.0.1"
"""Where the ranks of a worker on one node meet."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Nodes have as many ranks each, neighbours together. Tensor-parallel groups, whose ranks are neighbours
    and talk in every layer, are so within one node wherever they fit; what goes between nodes then is a
    pipeline's, once a step."""

    nodes: int
    per_node: int
    """Ranks of each."""

    @classmethod
    def of(cls, tp_size: int, pp_size: int, nodes: int) -> Layout:
        """ValueError names what is wrong with so many nodes, and what is allowed."""
        allowed = [count for count in range(1, MOST_NODES + 1) if _fits(tp_size, pp_size, count)]
        if nodes not in allowed:
            raise ValueError(
                f"nodes is {nodes}; allowed for tensor_parallel_size {tp_size} and pipeline_parallel_size "
                f"{pp_size}: {', '.join(map(str, allowed))}"
            )
        return cls(nodes, tp_size * pp_size // nodes)

    def ranks_of(self, node: int) -> range:
        return range(node * self.per_node, (node + 1) * self.per_node)

    def place_of(self, rank: int) -> int:
        """Its number among those of its node."""
        return rank % self.per_node


def _fits(tp_size: int, pp_size: int, nodes: int) -> bool:
    """Whether no node has parts of two tensor-parallel groups beside or in place of a whole one."""
    per_node, rest = divmod(tp_size * pp_size, nodes)
    return not rest and (per_node % tp_size == 0 or tp_size % per_node == 0)
