"""Who may have a worker take another role, and what must be right about asking."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import grpc

from baton.connector.identity import switch_is_valid
from baton.v1 import worker_pb2
from baton.worker.config import ROLES, RoleName
from baton.worker.post import Post

LONGEST_TIMEOUT_S = 86_400.0

TO_PROTO: Mapping[RoleName, worker_pb2.Role.ValueType] = MappingProxyType(
    {
        "prefill": worker_pb2.ROLE_PREFILL,
        "decode": worker_pb2.ROLE_DECODE,
        "both": worker_pb2.ROLE_BOTH,
    }
)
_FROM_PROTO: Mapping[int, RoleName] = MappingProxyType({value: name for name, value in TO_PROTO.items()})


class SwitchRefusedError(Exception):
    """A worker keeps its role; ``status`` is what the caller is told, with the text."""

    def __init__(self, status: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Switching(Protocol):
    """Who has a worker change its role."""

    async def switch(self, request: worker_pb2.SwitchRoleRequest) -> worker_pb2.SwitchRoleReply:
        """Returns when the worker serves in the role that was asked for. Raises SwitchRefusedError."""


def role_asked_for(request: worker_pb2.SwitchRoleRequest, post: Post, cluster_key: bytes) -> RoleName:
    """The role, if the request is in order, may be made, and is meant for this worker as it is now.
    SwitchRefusedError otherwise."""
    role = _FROM_PROTO.get(request.role)
    if role is None:
        allowed = ", ".join(ROLES)
        raise SwitchRefusedError(
            grpc.StatusCode.INVALID_ARGUMENT, f"role: must be one of {allowed}, not {request.role}"
        )
    timeout = request.timeout_s
    if not (math.isfinite(timeout) and 0 <= timeout <= LONGEST_TIMEOUT_S):
        raise SwitchRefusedError(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"timeout_s: must be between 0 and {LONGEST_TIMEOUT_S:g}, not {timeout:g}",
        )
    if not cluster_key:
        raise SwitchRefusedError(
            grpc.StatusCode.PERMISSION_DENIED, "this worker has no cluster key, so nobody may switch its role"
        )
    if not switch_is_valid(request.proof, cluster_key, request.incarnation, role):
        raise SwitchRefusedError(
            grpc.StatusCode.PERMISSION_DENIED, "proof: it is not this cluster's: is the cluster key the same?"
        )
    if request.incarnation != post.incarnation:
        raise SwitchRefusedError(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"incarnation: {request.incarnation} is not here; it has ended, or has changed its role since",
        )
    return role
