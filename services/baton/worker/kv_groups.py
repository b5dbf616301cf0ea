"""The groups of a worker's layers, as routers are told of them."""

from __future__ import annotations

from baton.core.kv_groups_proto import needs_to_proto
from baton.core.prefix_hit import GroupNeeds
from baton.v1 import worker_pb2
from baton_kernels.kv_layout import KVGroup, KVLayout, TokenKV
from baton_kernels.window import ChunkedWindow


def groups_of(layout: KVLayout) -> list[worker_pb2.KVGroup]:
    """Return the groups of a layout, in its order: a group's index is what names it in block events."""
    return [needs_to_proto(_needs_of(group)) for group in layout.groups]


def _needs_of(group: KVGroup) -> GroupNeeds:
    if not isinstance(group.kv, TokenKV) or group.kind != "window":
        return GroupNeeds(group.kind)
    window = group.kv.window
    if isinstance(window, ChunkedWindow):
        return GroupNeeds("window", window.size, chunked=True)
    assert window is not None  # or it were no window
    return GroupNeeds("window", window)
