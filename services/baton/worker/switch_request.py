"""The request that a worker takes another role, and its checks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import grpc

from baton.core.role import ROLES, Role
from baton.core.role_proto import role_from_proto
from baton.greeting.cluster_key import ClusterKeys
from baton.handoff.identity import new_incarnation, switch_is_valid
from baton.v1 import worker_pb2


@dataclass(frozen=True, slots=True)
class RoleIncarnation:
    """A role, and the name that the process has in it.

    Each change of role has a new name: a greeting, a handle, a link or an operator's proof from before the
    change is refused by its name, as if the process had been restarted, and never served in the wrong role.
    """

    role: Role
    incarnation: str

    @classmethod
    def new(cls, role: Role) -> RoleIncarnation:
        return cls(role, new_incarnation())


MAX_TIMEOUT_S = 86_400.0


class SwitchRefusedError(Exception):
    """The worker keeps its role. ``status`` and the text are sent to the caller."""

    def __init__(self, status: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Switching(Protocol):
    """Switches a worker's role."""

    async def switch(self, request: worker_pb2.SwitchRoleRequest) -> worker_pb2.SwitchRoleReply:
        """Return when the worker serves in the role asked for. Raises SwitchRefusedError."""


def role_asked_for(
    request: worker_pb2.SwitchRoleRequest, current: RoleIncarnation, keys: ClusterKeys
) -> Role:
    """Return the role of a valid, authenticated request that names this worker's current incarnation. Raises
    SwitchRefusedError for any other request."""
    role = role_from_proto(request.role)
    if role is None:
        allowed = ", ".join(ROLES)
        raise SwitchRefusedError(
            grpc.StatusCode.INVALID_ARGUMENT, f"role: must be one of {allowed}, not {request.role}"
        )
    timeout = request.timeout_s
    if not (math.isfinite(timeout) and 0 <= timeout <= MAX_TIMEOUT_S):
        raise SwitchRefusedError(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"timeout_s: must be between 0 and {MAX_TIMEOUT_S:g}, not {timeout:g}",
        )
    if not keys.current:
        raise SwitchRefusedError(
            grpc.StatusCode.PERMISSION_DENIED, "this worker has no cluster key, so nobody may switch its role"
        )
    if not switch_is_valid(request.proof, keys, request.incarnation, role):
        raise SwitchRefusedError(
            grpc.StatusCode.PERMISSION_DENIED, "proof: it is not this cluster's: is the cluster key the same?"
        )
    if request.incarnation != current.incarnation:
        raise SwitchRefusedError(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"incarnation: {request.incarnation} is not here; it has ended, or has changed its role since",
        )
    return role
