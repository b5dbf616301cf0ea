"""Roles as protobuf. Apart from ``core.role``, so that a command which talks to nobody loads no messages."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from baton.core.role import Role
from baton.v1 import worker_pb2 as pb

_TO_PROTO: Mapping[Role, pb.Role.ValueType] = MappingProxyType(
    {"prefill": pb.ROLE_PREFILL, "decode": pb.ROLE_DECODE, "both": pb.ROLE_BOTH}
)
_FROM_PROTO: Mapping[int, Role] = MappingProxyType({value: role for role, value in _TO_PROTO.items()})


def role_to_proto(role: Role) -> pb.Role.ValueType:
    return _TO_PROTO[role]


def role_from_proto(value: int) -> Role | None:
    """Return the role, or None for a role that is not specified or that only a newer release knows."""
    return _FROM_PROTO.get(value)
