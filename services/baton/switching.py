"""Asking a running worker to take another role."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import grpc

from baton.connector.identity import sign_switch
from baton.greeting.proofs import Caller, GreetingError
from baton.options import UserError, parse_address
from baton.tls.channels import Dialer
from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc as pb_grpc

GREETING_S = 5.0
CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    # A switch may take as long as a drain, but not longer than its worker's host is there.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
)


class SwitchError(UserError):
    """The worker has the role that it had, or nobody knows: ``status`` says which went wrong."""

    def __init__(self, address: str, status: grpc.StatusCode, reason: str) -> None:
        super().__init__(f"{address}: {reason} ({status.name})")
        self.status = status


@dataclass(frozen=True, slots=True)
class Switched:
    was: str
    now: str
    seconds: float
    """From the request until it served in the new role; 0.0: it had that role."""


async def switch_role(
    address: str, role: str, cluster_key: bytes, *, timeout_s: float = 0.0, dialer: Dialer | None = None
) -> Switched:
    """Have the worker at ``address`` take ``role`` ("prefill", "decode" or "both"), and return when it has.

    ``timeout_s``: for what is open there to end by itself; 0.0: the worker's own. ``dialer``: None for plain
    connections. Raises SwitchError.
    """
    try:
        parse_address(address)
    except ValueError as error:
        raise SwitchError(address, grpc.StatusCode.INVALID_ARGUMENT, str(error)) from error
    wanted = pb.Role.Value(f"ROLE_{role.upper()}")
    try:
        async with (dialer or Dialer()).channel(address, CHANNEL_OPTIONS) as channel:
            stub: pb_grpc.WorkerAsyncStub = pb_grpc.WorkerStub(channel)
            incarnation = await _incarnation(stub, cluster_key)
            request = pb.SwitchRoleRequest(
                role=wanted,
                incarnation=incarnation,
                timeout_s=timeout_s,
                proof=sign_switch(cluster_key, incarnation, role),
            )
            reply = await stub.SwitchRole(request)
    except grpc.aio.AioRpcError as error:
        raise SwitchError(address, error.code(), error.details() or "no reason was given") from error
    except GreetingError as error:
        raise SwitchError(address, grpc.StatusCode.PERMISSION_DENIED, str(error)) from error
    return Switched(_name(reply.was), _name(reply.now), reply.seconds)


async def _incarnation(stub: pb_grpc.WorkerAsyncStub, cluster_key: bytes) -> str:
    """The name of the process in the role that it has, as it proves it. What would make a router of us is not
    said. Raises GreetingError."""
    caller = Caller(cluster_key, "router", f"switch-{secrets.token_hex(8)}")
    stream = stub.Connect(None, timeout=GREETING_S)
    await stream.write(pb.RouterMessage(greeting=caller.greeting))
    answer = await stream.read()
    stream.cancel()
    if not isinstance(answer, pb.WorkerMessage) or not answer.HasField("challenge"):
        raise GreetingError("it answers a greeting with no challenge: is it of an older release?")
    caller.prove(answer.challenge)
    return answer.challenge.incarnation


def _name(role: pb.Role.ValueType) -> str:
    return pb.Role.Name(role).removeprefix("ROLE_").lower()
