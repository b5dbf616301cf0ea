"""Asks a running worker to take another role."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import grpc

from baton.core.role import Role
from baton.core.role_proto import role_from_proto, role_to_proto
from baton.greeting.cluster_key import ClusterKeys
from baton.greeting.proofs import GREETING_S, Caller, GreetingError, NoChallengeError
from baton.handoff.identity import sign_switch
from baton.net.channels import Dialer
from baton.process.options import UserError, parse_address
from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc as pb_grpc

CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    # A switch may take as long as a drain, but must end when the worker's host vanishes.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
)


class SwitchError(UserError):
    """The worker kept its role, or its role is unknown: ``status`` says which."""

    def __init__(self, address: str, status: grpc.StatusCode, reason: str) -> None:
        super().__init__(f"{address}: {reason} ({status.name})")
        self.status = status


@dataclass(frozen=True, slots=True)
class Switched:
    was: str
    now: str
    seconds: float
    """The time from the request until the worker served in the new role, in seconds; 0.0: it had that
    role."""


async def switch_role(
    address: str, role: Role, keys: ClusterKeys, *, timeout_s: float = 0.0, dialer: Dialer | None = None
) -> Switched:
    """Have the worker at ``address`` take ``role``, and return when it has.

    ``timeout_s``: how long open requests may take to end by themselves; 0.0: the worker's own limit.
    ``dialer``: None for plain connections. Raises SwitchError.
    """
    try:
        parse_address(address)
    except ValueError as error:
        raise SwitchError(address, grpc.StatusCode.INVALID_ARGUMENT, str(error)) from error
    try:
        async with (dialer or Dialer()).channel(address, CHANNEL_OPTIONS) as channel:
            stub: pb_grpc.WorkerAsyncStub = pb_grpc.WorkerStub(channel)
            incarnation, key = await _met(stub, keys)
            request = pb.SwitchRoleRequest(
                role=role_to_proto(role),
                incarnation=incarnation,
                timeout_s=timeout_s,
                proof=sign_switch(key, incarnation, role),
            )
            reply = await stub.SwitchRole(request)
    except grpc.aio.AioRpcError as error:
        raise SwitchError(address, error.code(), error.details() or "no reason was given") from error
    except GreetingError as error:
        raise SwitchError(address, grpc.StatusCode.PERMISSION_DENIED, str(error)) from error
    return Switched(_name(reply.was), _name(reply.now), reply.seconds)


async def _met(stub: pb_grpc.WorkerAsyncStub, keys: ClusterKeys) -> tuple[str, bytes]:
    """Return the incarnation of the worker's role, which the worker proves, and the cluster key by which it
    does. The greeting stops before the caller counts as a router. Raises GreetingError."""
    caller = Caller(keys, "router", f"switch-{secrets.token_hex(8)}")
    stream = stub.Connect(None, timeout=GREETING_S)
    await stream.write(pb.RouterMessage(greeting=caller.greeting))
    answer = await stream.read()
    stream.cancel()
    if not isinstance(answer, pb.WorkerMessage) or not answer.HasField("challenge"):
        raise NoChallengeError
    caller.prove(answer.challenge)
    return answer.challenge.incarnation, caller.agreed


def _name(value: int) -> str:
    return role_from_proto(value) or "unknown"
