"""The groups of a worker's layers, as routers are told of them."""

from __future__ import annotations

from baton.core.kv_groups_proto import needs_to_proto
from baton.engine.kv.prefix_cache import group_needs
from baton.v1 import worker_pb2
from baton_kernels.kv_layout import KVLayout


def groups_of(layout: KVLayout) -> list[worker_pb2.KVGroup]:
    """Return the groups of a layout, in its order: a group's index is what names it in block events."""
    return [needs_to_proto(group_needs(group)) for group in layout.groups]
