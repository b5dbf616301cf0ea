"""The needs of groups of layers as protobuf. Apart from ``core.prefix_hit``, which the engine uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from baton.core.prefix_hit import WHOLE_PREFIX, GroupKind, GroupNeeds
from baton.v1 import worker_pb2 as pb

MAX_GROUPS = 256
"""Most groups of a model: a byte names them in the keys of a prefix cache."""

_TO_PROTO: Mapping[GroupKind, pb.KVGroupKind.ValueType] = MappingProxyType(
    {
        "full": pb.KV_GROUP_KIND_FULL,
        "window": pb.KV_GROUP_KIND_WINDOW,
        "latent": pb.KV_GROUP_KIND_LATENT,
        "state": pb.KV_GROUP_KIND_STATE,
    }
)
_FROM_PROTO: Mapping[int, GroupKind] = MappingProxyType({value: kind for kind, value in _TO_PROTO.items()})


def needs_to_proto(needs: GroupNeeds) -> pb.KVGroup:
    return pb.KVGroup(kind=_TO_PROTO[needs.kind], window=needs.window, chunked=needs.chunked)


def needs_from_proto(groups: Sequence[pb.KVGroup]) -> tuple[GroupNeeds, ...]:
    """Return the needs of a worker's groups. Raises ValueError, naming the field, for what no group can be
    and for a kind that only a newer release knows."""
    if len(groups) > MAX_GROUPS:
        raise ValueError(f"kv_groups: at most {MAX_GROUPS} are allowed, not {len(groups)}")
    return tuple(_needs(number, group) for number, group in enumerate(groups)) or WHOLE_PREFIX


def _needs(number: int, group: pb.KVGroup) -> GroupNeeds:
    kind = _FROM_PROTO.get(group.kind)
    if kind is None:
        raise ValueError(f"kv_groups[{number}].kind: {group.kind} is none that this release knows")
    try:
        return GroupNeeds(kind, group.window, group.chunked)
    except ValueError as error:
        raise ValueError(f"kv_groups[{number}]: {error}") from None
